// One decode step of the state in AscendC, on vector cores. A unit is (b, head, S channels); state, new [b, H, P, N]
// fp32, so that units lie one after the other in them.
#include "common.h"

namespace latentscan {

constexpr uint32_t PARTS = P / S;
static_assert(P % S == 0 && S % 16 == 0 && N % 16 == 0, "rows are whole blocks");

class StateUpdate {
 public:
  static constexpr uint32_t BYTES =
      2 * 2 * S * N * 4 + 2 * (2 * S + 2 * N) * 2 + 2 * S * 2 + (4 * S + 4 * N) * 4 + S * LANES * 4 + 3 * LANES * 4;
  static_assert(BYTES <= UB_BYTES, "state_update: the tiles overflow the unified buffer");

  __aicore__ inline void Run(GM_ADDR state, GM_ADDR x, GM_ADDR dt, GM_ADDR A, GM_ADDR B, GM_ADDR C, GM_ADDR D, GM_ADDR z,
                             GM_ADDR bias, GM_ADDR new_state, GM_ADDR y, const Tiling &t) {
    int64_t units = t.batch * H * PARTS;
    auto states = Global<float>(state, units * S * N), news = Global<float>(new_state, units * S * N);
    auto xs = Global<half>(x, units * S), zs = Global<half>(z, units * S), ys = Global<half>(y, units * S);
    auto Bs = Global<half>(B, t.batch * G * N), Cs = Global<half>(C, t.batch * G * N);
    auto dts = Global<float>(dt, t.batch * H), As = Global<float>(A, H), biases = Global<float>(bias, H);
    auto Ds = Global<float>(D, H * P);
    pipe.InitBuffer(state_in, 2, S * N * sizeof(float));
    pipe.InitBuffer(state_out, 2, S * N * sizeof(float));
    pipe.InitBuffer(x_in, 2, 2 * S * sizeof(half));
    pipe.InitBuffer(bc_in, 2, 2 * N * sizeof(half));
    pipe.InitBuffer(y_out, 2, S * sizeof(half));
    pipe.InitBuffer(d_in, 1, S * sizeof(float));
    pipe.InitBuffer(x_work, 3 * S * sizeof(float));
    pipe.InitBuffer(bc_work, 4 * N * sizeof(float));
    pipe.InitBuffer(sums, S * LANES * sizeof(float));
    pipe.InitBuffer(small, 3 * LANES * sizeof(float));
    for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
      int64_t i = unit % PARTS, h = unit / PARTS % H, b = unit / PARTS / H, g = h / (H / G);
      auto tile = state_in.AllocTensor<float>();
      AscendC::DataCopy(tile, states[unit * S * N], S * N);
      state_in.EnQue(tile);
      auto both = x_in.AllocTensor<half>();
      AscendC::DataCopy(both[0], xs[unit * S], S);
      if (HAS_Z) AscendC::DataCopy(both[S], zs[unit * S], S);
      x_in.EnQue(both);
      auto bc = bc_in.AllocTensor<half>();
      AscendC::DataCopy(bc[0], Bs[(b * G + g) * N], N);
      AscendC::DataCopy(bc[N], Cs[(b * G + g) * N], N);
      bc_in.EnQue(bc);

      auto step = small.Get<float>()[0], one = small.Get<float>()[LANES], two = small.Get<float>()[2 * LANES];
      AscendC::Duplicate(step, dts.GetValue(b * H + h) + biases.GetValue(h), LANES);
      if (SOFTPLUS) Softplus(step, one, two, LANES);
      AscendC::Maxs(step, step, DT_MIN, LANES);
      AscendC::Mins(step, step, DT_MAX, LANES);
      AscendC::Muls(one, step, As.GetValue(h), LANES);
      AscendC::Exp(one, one, LANES);

      both = x_in.DeQue<half>();
      bc = bc_in.DeQue<half>();
      auto xt = x_work.Get<float>()[0], scaled = x_work.Get<float>()[S], other = x_work.Get<float>()[2 * S];
      auto Bt = bc_work.Get<float>()[0], Ct = bc_work.Get<float>()[N];
      auto row = bc_work.Get<float>()[2 * N], work = bc_work.Get<float>()[3 * N];
      AscendC::Cast(xt, both[0], AscendC::RoundMode::CAST_NONE, S);
      AscendC::Cast(Bt, bc[0], AscendC::RoundMode::CAST_NONE, N);
      AscendC::Cast(Ct, bc[N], AscendC::RoundMode::CAST_NONE, N);
      bc_in.FreeTensor(bc);
      VectorThenScalar();
      float decay = one.GetValue(0), dt_h = step.GetValue(0);
      AscendC::Muls(scaled, xt, dt_h, S);
      VectorThenScalar();
      tile = state_in.DeQue<float>();
      auto made = state_out.AllocTensor<float>();
      AscendC::Muls(made, tile, decay, S * N);
      auto reduced = sums.Get<float>();
      for (uint32_t p = 0; p < S; ++p) {
        AscendC::Muls(row, Bt, scaled.GetValue(p), N);
        AscendC::Add(made[p * N], made[p * N], row, N);
        AscendC::Mul(row, made[p * N], Ct, N);
        AscendC::ReduceSum(reduced[p * LANES], row, work, N);
      }
      state_out.EnQue(made);
      state_in.FreeTensor(tile);
      VectorThenScalar();
      for (uint32_t p = 0; p < S; ++p) scaled.SetValue(p, reduced.GetValue(p * LANES));
      ScalarThenVector();
      if (HAS_D) {
        auto d = d_in.AllocTensor<float>();
        AscendC::DataCopy(d, Ds[h * P + i * S], S);
        d_in.EnQue(d);
        d = d_in.DeQue<float>();
        AscendC::Mul(xt, xt, d, S);
        AscendC::Add(scaled, scaled, xt, S);
        d_in.FreeTensor(d);
      }
      if (HAS_Z) {
        AscendC::Cast(xt, both[S], AscendC::RoundMode::CAST_NONE, S);
        Gate(scaled, xt, other, S);
      }
      x_in.FreeTensor(both);
      auto out = y_out.AllocTensor<half>();
      AscendC::Cast(out, scaled, AscendC::RoundMode::CAST_RINT, S);
      y_out.EnQue(out);
      out = y_out.DeQue<half>();
      AscendC::DataCopy(ys[unit * S], out, S);
      y_out.FreeTensor(out);
      made = state_out.DeQue<float>();
      AscendC::DataCopy(news[unit * S * N], made, S * N);
      state_out.FreeTensor(made);
    }
  }

 private:
  TPipe pipe;
  TQue<TPosition::VECIN, 2> state_in, x_in, bc_in;
  TQue<TPosition::VECIN, 1> d_in;
  TQue<TPosition::VECOUT, 2> state_out, y_out;
  TBuf<TPosition::VECCALC> x_work, bc_work, sums, small;
};

}  // namespace latentscan

extern "C" __global__ __aicore__ void latentscan_state_update(GM_ADDR state, GM_ADDR x, GM_ADDR dt, GM_ADDR A, GM_ADDR B,
                                                              GM_ADDR C, GM_ADDR D, GM_ADDR z, GM_ADDR bias,
                                                              GM_ADDR new_state, GM_ADDR y, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  latentscan::StateUpdate().Run(state, x, dt, A, B, C, D, z, bias, new_state, y, latentscan::ReadTiling(tiling));
}
