// The chunk scan, forward, in AscendC. Every kernel is of one kind of core, so that no core waits for another within a
// launch: vector cores do decay, weights, carry and output, cube cores the products between them.
//
//   decay     cum, step [b, H, chunks, Q]                                    vector
//   scores    C Bᵀ of a chunk, per group                                     cube
//   weights   scores x decay x step in fp16, and x scaled for the state      vector
//   inner     weights · x          states   scaled xᵀ · B                    cube
//   carry     the state before each chunk, in fp16; the last one in fp32     vector
//   entering  C · stateᵀ                                                     cube
//   output    their sum, D and the gate                                      vector
//
// A unit is (b, chunk, head) and numbered in this order. Tokens are padded to whole chunks by the caller; y is not.
#include "common.h"

namespace latentscan {

static_assert(Q % 16 == 0 && P % 16 == 0 && N % 16 == 0, "tiles are whole fractals of 16");
static_assert(H % G == 0, "heads share the groups evenly");

constexpr uint32_t CARRY = 2048;  // elements of a state that one unit of carry takes
constexpr uint32_t BLOCKS = (P * N + CARRY - 1) / CARRY;

__aicore__ inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---------------------------------------------------------------------------------------------------------- decay

class Decay {
 public:
  __aicore__ inline void Run(GM_ADDR dt, GM_ADDR A, GM_ADDR bias, GM_ADDR starts, GM_ADDR cum, GM_ADDR step,
                             const Tiling &t) {
    int64_t units = t.batch * t.chunks * H, padded = t.chunks * Q;
    auto dts = Global<float>(dt, t.batch * H * padded), starting = Global<float>(starts, t.batch * padded);
    auto As = Global<float>(A, H), biases = Global<float>(bias, H);
    auto cums = Global<float>(cum, units * Q), steps = Global<float>(step, units * Q);
    pipe.InitBuffer(input, 2, Q * sizeof(float));
    pipe.InitBuffer(flags, 2, Q * sizeof(float));
    pipe.InitBuffer(output, 2, 2 * Q * sizeof(float));
    pipe.InitBuffer(ramp, Q * sizeof(float));
    pipe.InitBuffer(scratch, (3 * Q + 64) * sizeof(float));
    pipe.InitBuffer(wide, 2 * Q * LANES * sizeof(float));
    auto position = ramp.Get<float>();
    for (uint32_t i = 0; i < Q; ++i) position.SetValue(i, static_cast<float>(i));
    auto diagonal = scratch.Get<float>()[3 * Q];  // 8 x 8
    for (uint32_t i = 0; i < 64; ++i) diagonal.SetValue(i, i % LANES == i / LANES ? 1.0f : 0.0f);
    ScalarThenVector();
    for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
      int64_t h = unit % H, c = unit / H % t.chunks, b = unit / H / t.chunks;
      auto raw = input.AllocTensor<float>();
      AscendC::DataCopy(raw, dts[(b * H + h) * padded + c * Q], Q);
      input.EnQue(raw);
      auto first = flags.AllocTensor<float>();
      AscendC::DataCopy(first, starting[b * padded + c * Q], Q);
      flags.EnQue(first);
      auto v = input.DeQue<float>();
      first = flags.DeQue<float>();
      auto out = output.AllocTensor<float>();
      auto s = out[0], a = out[Q];
      auto one = scratch.Get<float>()[0], two = scratch.Get<float>()[Q], three = scratch.Get<float>()[2 * Q];
      AscendC::Adds(s, v, biases.GetValue(h), Q);
      if (SOFTPLUS) Softplus(s, one, two, Q);
      AscendC::Maxs(s, s, DT_MIN, Q);
      AscendC::Mins(s, s, DT_MAX, Q);
      // 1 for tokens of the sequence, 0 for padding: n - position, cut to [0, 1].
      AscendC::Muls(one, position, -1.0f, Q);
      AscendC::Adds(one, one, static_cast<float>(Least(Q, t.tokens - c * Q)), Q);
      AscendC::Maxs(one, one, 0.0f, Q);
      AscendC::Mins(one, one, 1.0f, Q);
      AscendC::Mul(s, s, one, Q);
      AscendC::Muls(two, s, As.GetValue(h), Q);
      // The first token of a packed sequence: nothing before it is left.
      AscendC::Muls(one, first, GONE, Q);
      AscendC::Add(two, two, one, Q);
      AscendC::Maxs(two, two, GONE, Q);
      AscendC::Mins(two, two, 0.0f, Q);
      RunningSum(a, two, three, diagonal);
      output.EnQue(out);
      input.FreeTensor(v);
      flags.FreeTensor(first);
      auto done = output.DeQue<float>();
      AscendC::DataCopy(steps[((b * H + h) * t.chunks + c) * Q], done[0], Q);
      AscendC::DataCopy(cums[((b * H + h) * t.chunks + c) * Q], done[Q], Q);
      output.FreeTensor(done);
    }
  }

 private:
  // Every number is spread over a block, so that blocks (and not unaligned numbers) are added at distances 1, 2, 4, ...
  __aicore__ inline void RunningSum(const LocalTensor<float> &to, const LocalTensor<float> &from,
                                    const LocalTensor<float> &scratch_row, const LocalTensor<float> &diagonal) {
    auto a = wide.Get<float>()[0], b = wide.Get<float>()[Q * LANES];
    AscendC::Brcb(a, from, Q / LANES, {1, 8});
    for (uint32_t by = 1; by < Q; by *= 2) {
      AscendC::Adds(b, a, 0.0f, by * LANES);
      AscendC::Add(b[by * LANES], a[by * LANES], a[0], (Q - by) * LANES);
      auto other = a;
      a = b;
      b = other;
    }
    for (uint32_t i = 0; i < Q / LANES; ++i) {  // of each 8 blocks, their diagonal
      AscendC::Mul(b, a[i * 64], diagonal, 64);
      AscendC::Add(b, b, b[32], 32);
      AscendC::Add(b, b, b[16], 16);
      AscendC::Add(to[i * LANES], b, b[LANES], LANES);
    }
    (void)scratch_row;
  }

  TPipe pipe;
  TQue<TPosition::VECIN, 2> input, flags;
  TQue<TPosition::VECOUT, 2> output;
  TBuf<TPosition::VECCALC> ramp, scratch, wide;
};

// -------------------------------------------------------------------------------------------------------- weights

class Weights {
 public:
  static constexpr uint32_t BYTES = 2 * (Q * Q * 4 + Q * P * 2 + 2 * Q * 4 + Q * Q * 2 + Q * P * 2) + 2 * Q * Q * 4 +
                                    Q * P * 4 + 2 * Q * 4;
  static_assert(BYTES <= UB_BYTES, "weights: the tiles overflow the unified buffer");

  __aicore__ inline void Run(GM_ADDR scores, GM_ADDR x, GM_ADDR cum, GM_ADDR step, GM_ADDR weights, GM_ADDR scaled,
                             const Tiling &t) {
    int64_t units = t.batch * t.chunks * H;
    auto all = Global<float>(scores, t.batch * t.chunks * G * Q * Q);
    auto xs = Global<half>(x, (t.batch - 1) * t.x_batch + t.chunks * Q * t.x_token);
    auto cums = Global<float>(cum, units * Q), steps = Global<float>(step, units * Q);
    auto outputs = Global<half>(weights, units * Q * Q), states = Global<half>(scaled, units * Q * P);
    pipe.InitBuffer(score_in, 2, Q * Q * sizeof(float));
    pipe.InitBuffer(x_in, 2, Q * P * sizeof(half));
    pipe.InitBuffer(vector_in, 2, 2 * Q * sizeof(float));
    pipe.InitBuffer(weight_out, 2, Q * Q * sizeof(half));
    pipe.InitBuffer(x_out, 2, Q * P * sizeof(half));
    pipe.InitBuffer(causal, Q * Q * sizeof(float));
    pipe.InitBuffer(work, Q * Q * sizeof(float));
    pipe.InitBuffer(x_work, Q * P * sizeof(float));
    pipe.InitBuffer(vectors, 2 * Q * sizeof(float));
    auto mask = causal.Get<float>();
    for (uint32_t i = 0; i < Q * Q; ++i) mask.SetValue(i, i % Q <= i / Q ? 1.0f : 0.0f);
    ScalarThenVector();
    for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
      int64_t h = unit % H, c = unit / H % t.chunks, b = unit / H / t.chunks;
      int64_t at = ((b * H + h) * t.chunks + c) * Q;
      auto vector = vector_in.AllocTensor<float>();
      AscendC::DataCopy(vector[0], cums[at], Q);
      AscendC::DataCopy(vector[Q], steps[at], Q);
      vector_in.EnQue(vector);
      auto score = score_in.AllocTensor<float>();
      AscendC::DataCopy(score, all[((b * t.chunks + c) * G + h / (H / G)) * Q * Q], Q * Q);
      score_in.EnQue(score);
      auto tile = x_in.AllocTensor<half>();
      LoadRows(tile, xs[b * t.x_batch + c * Q * t.x_token + h * P], Q, P, t.x_token);
      x_in.EnQue(tile);

      vector = vector_in.DeQue<float>();
      auto minus = vectors.Get<float>()[0], weight = vectors.Get<float>()[Q];
      AscendC::Muls(minus, vector, -1.0f, Q);
      LoadThenScalar();
      AscendC::Adds(weight, minus, vector.GetValue(Q - 1), Q);
      AscendC::Exp(weight, weight, Q);
      AscendC::Mul(weight, weight, vector[Q], Q);
      auto decay = work.Get<float>();
      for (uint32_t row = 0; row < Q; ++row) AscendC::Adds(decay[row * Q], minus, vector.GetValue(row), Q);
      AscendC::Mins(decay, decay, 0.0f, Q * Q);  // what is masked must not overflow
      AscendC::Exp(decay, decay, Q * Q);
      AscendC::Mul(decay, decay, mask, Q * Q);
      score = score_in.DeQue<float>();
      AscendC::Mul(decay, decay, score, Q * Q);
      for (uint32_t row = 0; row < Q; ++row) AscendC::Mul(decay[row * Q], decay[row * Q], vector[Q], Q);
      auto made = weight_out.AllocTensor<half>();
      AscendC::Cast(made, decay, AscendC::RoundMode::CAST_RINT, Q * Q);
      weight_out.EnQue(made);
      score_in.FreeTensor(score);

      tile = x_in.DeQue<half>();
      auto wide = x_work.Get<float>();
      AscendC::Cast(wide, tile, AscendC::RoundMode::CAST_NONE, Q * P);
      VectorThenScalar();
      for (uint32_t row = 0; row < Q; ++row) AscendC::Muls(wide[row * P], wide[row * P], weight.GetValue(row), P);
      auto narrow = x_out.AllocTensor<half>();
      AscendC::Cast(narrow, wide, AscendC::RoundMode::CAST_RINT, Q * P);
      x_out.EnQue(narrow);
      x_in.FreeTensor(tile);
      vector_in.FreeTensor(vector);

      made = weight_out.DeQue<half>();
      AscendC::DataCopy(outputs[unit * Q * Q], made, Q * Q);
      weight_out.FreeTensor(made);
      narrow = x_out.DeQue<half>();
      AscendC::DataCopy(states[unit * Q * P], narrow, Q * P);
      x_out.FreeTensor(narrow);
    }
  }

 private:
  TPipe pipe;
  TQue<TPosition::VECIN, 2> score_in, x_in, vector_in;
  TQue<TPosition::VECOUT, 2> weight_out, x_out;
  TBuf<TPosition::VECCALC> causal, work, x_work, vectors;
};

// ----------------------------------------------------------------------------------------------------------- cube

// out [MM, NN] fp32 = A B of fp16, for one unit after the other. A is stored [MM, KK], or [KK, MM] if TA; B is stored
// [KK, NN], or [NN, KK] if TB.
template <uint32_t MM, uint32_t NN, uint32_t KK, bool TA, bool TB>
class Product {
 public:
  static_assert(MM * KK * 2 * 2 <= 64 * 1024 && KK * NN * 2 * 2 <= 64 * 1024, "an operand overflows L0A or L0B");
  static_assert(MM * NN * 4 <= 128 * 1024, "the product overflows L0C");
  static_assert(2 * 2 * (MM * KK + KK * NN) <= 512 * 1024, "the operands overflow L1");

  __aicore__ inline void Init() {
    pipe.InitBuffer(a1, 2, MM * KK * sizeof(half));
    pipe.InitBuffer(b1, 2, KK * NN * sizeof(half));
    pipe.InitBuffer(a2, 2, MM * KK * sizeof(half));
    pipe.InitBuffer(b2, 2, KK * NN * sizeof(half));
    pipe.InitBuffer(c1, MM * NN * sizeof(float) * 2 <= 128 * 1024 ? 2 : 1, MM * NN * sizeof(float));
  }

  __aicore__ inline void One(const GlobalTensor<float> &out, const GlobalTensor<half> &A, int64_t a_row,
                             const GlobalTensor<half> &B, int64_t b_row) {
    auto a = a1.template AllocTensor<half>();
    Fractals<TA ? KK : MM, TA ? MM : KK>(a, A, a_row);
    a1.EnQue(a);
    auto b = b1.template AllocTensor<half>();
    Fractals<TB ? NN : KK, TB ? KK : NN>(b, B, b_row);
    b1.EnQue(b);

    a = a1.template DeQue<half>();
    auto left = a2.template AllocTensor<half>();
    for (uint32_t m = 0; m < MM / 16; ++m) {
      AscendC::LoadData2DParams load;
      load.repeatTimes = KK / 16;
      load.srcStride = TA ? 1 : MM / 16;
      load.ifTranspose = TA;
      AscendC::LoadData(left[m * KK * 16], a[TA ? m * KK * 16 : m * 256], load);
    }
    a2.EnQue(left);
    a1.FreeTensor(a);
    b = b1.template DeQue<half>();
    auto right = b2.template AllocTensor<half>();
    for (uint32_t k = 0; k < KK / 16; ++k) {
      AscendC::LoadData2DParams load;
      load.repeatTimes = NN / 16;
      load.srcStride = TB ? 1 : KK / 16;
      load.ifTranspose = !TB;
      AscendC::LoadData(right[k * NN * 16], b[TB ? k * NN * 16 : k * 256], load);
    }
    b2.EnQue(right);
    b1.FreeTensor(b);

    left = a2.template DeQue<half>();
    right = b2.template DeQue<half>();
    auto product = c1.template AllocTensor<float>();
    AscendC::MmadParams mmad;
    mmad.m = MM;
    mmad.n = NN;
    mmad.k = KK;
    mmad.cmatrixInitVal = true;
    AscendC::Mmad(product, left, right, mmad);
    c1.EnQue(product);
    a2.FreeTensor(left);
    b2.FreeTensor(right);

    product = c1.template DeQue<float>();
    AscendC::FixpipeParamsV220 store;
    store.nSize = NN;
    store.mSize = MM;
    store.srcStride = MM;
    store.dstStride = NN;
    store.ndNum = 1;
    store.srcNdStride = 0;
    store.dstNdStride = 0;
    AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(out, product, store);
    c1.FreeTensor(product);
  }

 private:
  // Rows in memory to the fractals of L1: blocks of 16 columns, one after the other.
  template <uint32_t ROWS, uint32_t COLUMNS>
  __aicore__ inline void Fractals(const LocalTensor<half> &to, const GlobalTensor<half> &from, int64_t row) {
    AscendC::Nd2NzParams copy;
    copy.ndNum = 1;
    copy.nValue = ROWS;
    copy.dValue = COLUMNS;
    copy.srcNdMatrixStride = 0;
    copy.srcDValue = static_cast<uint16_t>(row);
    copy.dstNzC0Stride = ROWS;
    copy.dstNzNStride = 1;
    copy.dstNzMatrixStride = 0;
    AscendC::DataCopy(to, from, copy);
  }

  TPipe pipe;
  TQue<TPosition::A1, 2> a1;
  TQue<TPosition::B1, 2> b1;
  TQue<TPosition::A2, 2> a2;
  TQue<TPosition::B2, 2> b2;
  TQue<TPosition::CO1, 2> c1;
};

// ---------------------------------------------------------------------------------------------------------- carry

class Carry {
 public:
  __aicore__ inline void Run(GM_ADDR states, GM_ADDR cum, GM_ADDR start, GM_ADDR entering, GM_ADDR last,
                             const Tiling &t) {
    int64_t units = t.batch * H * BLOCKS, all = t.batch * t.chunks * H;
    auto added = Global<float>(states, all * P * N), cums = Global<float>(cum, all * Q);
    auto starting = Global<float>(start, t.batch * H * P * N), final_ = Global<float>(last, t.batch * H * P * N);
    auto before = Global<half>(entering, all * P * N);
    pipe.InitBuffer(input, 2, CARRY * sizeof(float));
    pipe.InitBuffer(end_in, 2, LANES * sizeof(float));
    pipe.InitBuffer(output, 2, CARRY * sizeof(half));
    pipe.InitBuffer(last_out, 1, CARRY * sizeof(float));
    pipe.InitBuffer(running, CARRY * sizeof(float));
    pipe.InitBuffer(small, LANES * sizeof(float));
    for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
      int64_t i = unit % BLOCKS, h = unit / BLOCKS % H, b = unit / BLOCKS / H;
      uint32_t count = static_cast<uint32_t>(Least(CARRY, P * N - i * CARRY));
      int64_t place = (b * H + h) * P * N + i * CARRY;
      auto state = running.Get<float>();
      auto loaded = input.AllocTensor<float>();
      AscendC::DataCopy(loaded, starting[place], count);
      input.EnQue(loaded);
      loaded = input.DeQue<float>();
      AscendC::Adds(state, loaded, 0.0f, count);
      input.FreeTensor(loaded);
      for (int64_t c = 0; c < t.chunks; ++c) {
        int64_t at = ((b * t.chunks + c) * H + h) * P * N + i * CARRY;
        auto narrow = output.AllocTensor<half>();
        AscendC::Cast(narrow, state, AscendC::RoundMode::CAST_RINT, count);
        output.EnQue(narrow);
        narrow = output.DeQue<half>();
        AscendC::DataCopy(before[at], narrow, count);
        output.FreeTensor(narrow);
        auto end = end_in.AllocTensor<float>();  // the last block of cum
        AscendC::DataCopy(end, cums[((b * H + h) * t.chunks + c) * Q + Q - LANES], LANES);
        end_in.EnQue(end);
        end = end_in.DeQue<float>();
        auto decay = small.Get<float>();
        AscendC::Exp(decay, end, LANES);
        end_in.FreeTensor(end);
        VectorThenScalar();
        AscendC::Muls(state, state, decay.GetValue(LANES - 1), count);
        loaded = input.AllocTensor<float>();
        AscendC::DataCopy(loaded, added[at], count);
        input.EnQue(loaded);
        loaded = input.DeQue<float>();
        AscendC::Add(state, state, loaded, count);
        input.FreeTensor(loaded);
      }
      auto out = last_out.AllocTensor<float>();
      AscendC::Adds(out, state, 0.0f, count);
      last_out.EnQue(out);
      out = last_out.DeQue<float>();
      AscendC::DataCopy(final_[place], out, count);
      last_out.FreeTensor(out);
    }
  }

 private:
  TPipe pipe;
  TQue<TPosition::VECIN, 2> input, end_in;
  TQue<TPosition::VECOUT, 2> output;
  TQue<TPosition::VECOUT, 1> last_out;
  TBuf<TPosition::VECCALC> running, small;
};

// --------------------------------------------------------------------------------------------------------- output

class Output {
 public:
  static constexpr uint32_t BYTES = 2 * (2 * Q * P * 4 + Q * 4) + 3 * Q * P * 2 + 2 * Q * P * 4 + (P + Q) * 4;
  static_assert(BYTES <= UB_BYTES, "output: the tiles overflow the unified buffer");

  __aicore__ inline void Run(GM_ADDR inner, GM_ADDR outer, GM_ADDR x, GM_ADDR z, GM_ADDR D, GM_ADDR cum, GM_ADDR y,
                             const Tiling &t) {
    int64_t units = t.batch * t.chunks * H;
    auto inside = Global<float>(inner, units * Q * P), before = Global<float>(outer, units * Q * P);
    auto xs = Global<half>(x, (t.batch - 1) * t.x_batch + t.chunks * Q * t.x_token);
    auto zs = Global<half>(z, (t.batch - 1) * t.z_batch + t.chunks * Q * t.z_token);
    auto Ds = Global<float>(D, H * P), cums = Global<float>(cum, units * Q);
    auto ys = Global<half>(y, t.batch * t.tokens * H * P);
    pipe.InitBuffer(input, 2, 2 * Q * P * sizeof(float));
    pipe.InitBuffer(cum_in, 2, Q * sizeof(float));
    pipe.InitBuffer(x_in, 1, Q * P * sizeof(half));
    pipe.InitBuffer(z_in, 1, Q * P * sizeof(half));
    pipe.InitBuffer(output, 1, Q * P * sizeof(half));
    pipe.InitBuffer(d_in, 1, P * sizeof(float));
    pipe.InitBuffer(work, 2 * Q * P * sizeof(float));
    pipe.InitBuffer(small, Q * sizeof(float));
    for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
      int64_t h = unit % H, c = unit / H % t.chunks, b = unit / H / t.chunks;
      auto both = input.AllocTensor<float>();
      AscendC::DataCopy(both[0], inside[unit * Q * P], Q * P);
      AscendC::DataCopy(both[Q * P], before[unit * Q * P], Q * P);
      input.EnQue(both);
      auto cum_t = cum_in.AllocTensor<float>();
      AscendC::DataCopy(cum_t, cums[((b * H + h) * t.chunks + c) * Q], Q);
      cum_in.EnQue(cum_t);
      both = input.DeQue<float>();
      auto total = both[0], state = both[Q * P];
      cum_t = cum_in.DeQue<float>();
      auto decay = small.Get<float>();
      AscendC::Exp(decay, cum_t, Q);
      cum_in.FreeTensor(cum_t);
      VectorThenScalar();
      for (uint32_t row = 0; row < Q; ++row) AscendC::Muls(state[row * P], state[row * P], decay.GetValue(row), P);
      AscendC::Add(total, total, state, Q * P);
      auto wide = work.Get<float>()[0], other = work.Get<float>()[Q * P];
      if (HAS_D) {
        auto tile = x_in.AllocTensor<half>();
        LoadRows(tile, xs[b * t.x_batch + c * Q * t.x_token + h * P], Q, P, t.x_token);
        x_in.EnQue(tile);
        auto d = d_in.AllocTensor<float>();
        AscendC::DataCopy(d, Ds[h * P], P);
        d_in.EnQue(d);
        tile = x_in.DeQue<half>();
        AscendC::Cast(wide, tile, AscendC::RoundMode::CAST_NONE, Q * P);
        x_in.FreeTensor(tile);
        d = d_in.DeQue<float>();
        for (uint32_t row = 0; row < Q; ++row) AscendC::Mul(wide[row * P], wide[row * P], d, P);
        d_in.FreeTensor(d);
        AscendC::Add(total, total, wide, Q * P);
      }
      if (HAS_Z) {
        auto tile = z_in.AllocTensor<half>();
        LoadRows(tile, zs[b * t.z_batch + c * Q * t.z_token + h * P], Q, P, t.z_token);
        z_in.EnQue(tile);
        tile = z_in.DeQue<half>();
        AscendC::Cast(wide, tile, AscendC::RoundMode::CAST_NONE, Q * P);
        z_in.FreeTensor(tile);
        Gate(total, wide, other, Q * P);
      }
      auto narrow = output.AllocTensor<half>();
      AscendC::Cast(narrow, total, AscendC::RoundMode::CAST_RINT, Q * P);
      output.EnQue(narrow);
      input.FreeTensor(both);
      narrow = output.DeQue<half>();
      StoreRows(ys[((b * t.tokens + c * Q) * H + h) * P], narrow, static_cast<uint32_t>(Least(Q, t.tokens - c * Q)), P,
                H * P);
      output.FreeTensor(narrow);
    }
  }

 private:
  TPipe pipe;
  TQue<TPosition::VECIN, 2> input, cum_in;
  TQue<TPosition::VECIN, 1> x_in, z_in, d_in;
  TQue<TPosition::VECOUT, 1> output;
  TBuf<TPosition::VECCALC> work, small;
};

}  // namespace latentscan

// -------------------------------------------------------------------------------------------------------- entries

extern "C" __global__ __aicore__ void latentscan_decay(GM_ADDR dt, GM_ADDR A, GM_ADDR bias, GM_ADDR starts, GM_ADDR cum,
                                                       GM_ADDR step, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  latentscan::Decay().Run(dt, A, bias, starts, cum, step, latentscan::ReadTiling(tiling));
}

extern "C" __global__ __aicore__ void latentscan_scores(GM_ADDR C, GM_ADDR B, GM_ADDR scores, GM_ADDR tiling) {
  using namespace latentscan;
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Tiling t = ReadTiling(tiling);
  int64_t units = t.batch * t.chunks * G, elements = (t.batch - 1) * t.bc_batch + t.chunks * Q * t.bc_token;
  auto left = Global<half>(C, elements), right = Global<half>(B, elements);
  auto out = Global<float>(scores, units * Q * Q);
  Product<Q, Q, N, false, true> product;
  product.Init();
  for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
    int64_t at = unit / G / t.chunks * t.bc_batch + unit / G % t.chunks * Q * t.bc_token + unit % G * N;
    product.One(out[unit * Q * Q], left[at], t.bc_token, right[at], t.bc_token);
  }
}

extern "C" __global__ __aicore__ void latentscan_weights(GM_ADDR scores, GM_ADDR x, GM_ADDR cum, GM_ADDR step,
                                                         GM_ADDR weights, GM_ADDR scaled, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  latentscan::Weights().Run(scores, x, cum, step, weights, scaled, latentscan::ReadTiling(tiling));
}

extern "C" __global__ __aicore__ void latentscan_inner(GM_ADDR weights, GM_ADDR x, GM_ADDR inner, GM_ADDR tiling) {
  using namespace latentscan;
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Tiling t = ReadTiling(tiling);
  int64_t units = t.batch * t.chunks * H;
  auto left = Global<half>(weights, units * Q * Q);
  auto right = Global<half>(x, (t.batch - 1) * t.x_batch + t.chunks * Q * t.x_token);
  auto out = Global<float>(inner, units * Q * P);
  Product<Q, P, Q, false, false> product;
  product.Init();
  for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
    int64_t at = unit / H / t.chunks * t.x_batch + unit / H % t.chunks * Q * t.x_token + unit % H * P;
    product.One(out[unit * Q * P], left[unit * Q * Q], Q, right[at], t.x_token);
  }
}

extern "C" __global__ __aicore__ void latentscan_states(GM_ADDR scaled, GM_ADDR B, GM_ADDR states, GM_ADDR tiling) {
  using namespace latentscan;
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Tiling t = ReadTiling(tiling);
  int64_t units = t.batch * t.chunks * H;
  auto left = Global<half>(scaled, units * Q * P);
  auto right = Global<half>(B, (t.batch - 1) * t.bc_batch + t.chunks * Q * t.bc_token);
  auto out = Global<float>(states, units * P * N);
  Product<P, N, Q, true, false> product;
  product.Init();
  for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
    int64_t g = unit % H / (H / G);
    int64_t at = unit / H / t.chunks * t.bc_batch + unit / H % t.chunks * Q * t.bc_token + g * N;
    product.One(out[unit * P * N], left[unit * Q * P], P, right[at], t.bc_token);
  }
}

extern "C" __global__ __aicore__ void latentscan_carry(GM_ADDR states, GM_ADDR cum, GM_ADDR start, GM_ADDR entering,
                                                       GM_ADDR last, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  latentscan::Carry().Run(states, cum, start, entering, last, latentscan::ReadTiling(tiling));
}

extern "C" __global__ __aicore__ void latentscan_entering(GM_ADDR C, GM_ADDR entering, GM_ADDR outer, GM_ADDR tiling) {
  using namespace latentscan;
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  Tiling t = ReadTiling(tiling);
  int64_t units = t.batch * t.chunks * H;
  auto left = Global<half>(C, (t.batch - 1) * t.bc_batch + t.chunks * Q * t.bc_token);
  auto right = Global<half>(entering, units * P * N);
  auto out = Global<float>(outer, units * Q * P);
  Product<Q, P, N, false, true> product;
  product.Init();
  for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
    int64_t g = unit % H / (H / G);
    int64_t at = unit / H / t.chunks * t.bc_batch + unit / H % t.chunks * Q * t.bc_token + g * N;
    product.One(out[unit * Q * P], left[at], t.bc_token, right[unit * P * N], N);
  }
}

extern "C" __global__ __aicore__ void latentscan_output(GM_ADDR inner, GM_ADDR outer, GM_ADDR x, GM_ADDR z, GM_ADDR D,
                                                        GM_ADDR cum, GM_ADDR y, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  latentscan::Output().Run(inner, outer, x, z, D, cum, y, latentscan::ReadTiling(tiling));
}
