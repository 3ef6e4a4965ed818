// Host semantics of the part of the public AscendC interface that our kernels use: what they compute, and how they use
// buffers. Written by us against the public documentation. It is neither the vendor's compiler nor its simulator, and
// proves nothing about timing, or about synchronisation beyond the checks named here.
//
// Checked, each with an exception: the capacity of every memory; every access within its tensor; 32-byte addresses of
// vector instructions and copies, 512-byte fractals; a destination that overlaps a source it is not equal to; queue
// discipline: what one pipe wrote goes through EnQue and DeQue before another pipe touches it, copies use queues alone,
// nothing is used once it is freed; vector work on cube cores and the other way round; scalar access to what another
// pipe has not finished.
#ifndef LATENTSCAN_HOST_KERNEL_OPERATOR_H
#define LATENTSCAN_HOST_KERNEL_OPERATOR_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "core.h"

#define __aicore__
#define __global__
#define __gm__
using GM_ADDR = uint8_t *;
enum { EVENT_ID0 = 0 };
enum { KERNEL_TYPE_AIV_ONLY = 1, KERNEL_TYPE_AIC_ONLY = 2 };
#define KERNEL_TASK_TYPE_DEFAULT(kind) AscendC::host::core().kind_of_core = (kind)

// fp16 with round to nearest even.
class half {
 public:
  half() = default;
  explicit half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) {
      raw = static_cast<uint16_t>(sign | 0x7E00);
    } else if (magnitude >= 0x477FF000) {
      raw = static_cast<uint16_t>(sign | 0x7C00);
    } else {
      int exponent;
      float fraction = std::frexp(std::fabs(value), &exponent);
      int scale = std::max(exponent, -13) - 11;  // the unit of the last place is 2^scale
      double units = std::nearbyint(std::ldexp(static_cast<double>(fraction), exponent - scale));
      float rounded = static_cast<float>(std::ldexp(units, scale));
      std::memcpy(&bits, &rounded, 4);
      if (rounded < 6.103515625e-05f) {
        raw = static_cast<uint16_t>(sign | static_cast<uint32_t>(units));
      } else {
        raw = static_cast<uint16_t>(sign | (((bits >> 23) - 112) << 10) | (bits >> 13 & 0x3FF));
      }
    }
  }
  explicit half(int value) : half(static_cast<float>(value)) {}
  explicit operator float() const {
    uint32_t exponent = raw >> 10 & 31, fraction = raw & 0x3FF;
    float sign = raw & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? std::numeric_limits<float>::quiet_NaN() : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
    return sign * std::ldexp(static_cast<float>(fraction | 0x400), static_cast<int>(exponent) - 25);
  }

 private:
  uint16_t raw = 0;
};

namespace AscendC {

inline int64_t GetBlockIdx() { return host::core().block; }
inline int64_t GetBlockNum() { return host::core().blocks; }

// ------------------------------------------------------------------------------------------------------- tensors

template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T *address, uint64_t elements) {
    data = address;
    size = static_cast<int64_t>(elements);
  }
  GlobalTensor operator[](int64_t offset) const {
    if (offset < 0 || offset > size) host::fail("overrun: offset " + std::to_string(offset) + " of a global tensor");
    GlobalTensor part;
    part.data = data + offset;
    part.size = size - offset;
    return part;
  }
  T GetValue(int64_t at) const { return *Within(at, 1, "a scalar read"); }
  T *Within(int64_t at, int64_t count, const char *what) const {
    if (at < 0 || count < 0 || at + count > size)
      host::fail("overrun: " + std::string(what) + " of " + std::to_string(at + count) + " elements of a global tensor of " +
                 std::to_string(size));
    return data + at;
  }

 private:
  T *data = nullptr;
  int64_t size = 0;
};

template <typename T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(uint8_t *address, int64_t bytes, host::Memory where) : memory(where), data(address), size(bytes) {}
  LocalTensor operator[](int64_t offset) const {
    int64_t bytes = offset * static_cast<int64_t>(sizeof(T));
    if (offset < 0 || bytes > size) host::fail("overrun: offset " + std::to_string(offset) + " of a local tensor");
    return LocalTensor(data + bytes, size - bytes, memory);
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(data, size, memory);
  }
  int64_t GetSize() const { return size / static_cast<int64_t>(sizeof(T)); }
  T GetValue(int64_t at) const {
    auto &core = host::core();
    const uint8_t *from = reinterpret_cast<const uint8_t *>(Within(at, 1, "a scalar read"));
    auto *buffer = host::buffer_of(from);
    if (buffer && buffer->free) host::fail("queue: a scalar read of a freed buffer");
    for (const auto &range : core.arriving)
      if (from >= range.begin && from < range.end) host::fail("race: a scalar read of a load that has not arrived");
    for (const auto &range : core.computing)
      if (from >= range.begin && from < range.end)
        host::fail("race: a scalar read of what the vector pipe has not finished");
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
  }
  void SetValue(int64_t at, T value) const {
    std::memcpy(Within(at, 1, "a scalar write"), &value, sizeof(T));
    host::core().scalar_pending = true;
  }
  T *Within(int64_t at, int64_t count, const char *what) const {
    if (at < 0 || count < 0 || (at + count) * static_cast<int64_t>(sizeof(T)) > size)
      host::fail("overrun: " + std::string(what) + " of " + std::to_string(at + count) + " elements of a local tensor of " +
                 std::to_string(GetSize()));
    return reinterpret_cast<T *>(data) + at;
  }
  // `count` elements from an address that is a multiple of `unit` bytes.
  T *Aligned(int64_t count, int64_t unit, const char *what) const {
    auto offset = data - host::core().base(memory);
    if (offset % unit)
      host::fail("alignment: " + std::string(what) + " at byte " + std::to_string(offset) + " of " +
                 host::name_of(memory) + ", which is no multiple of " + std::to_string(unit));
    return Within(0, count, what);
  }
  void In(host::Memory wanted, const char *what) const {
    if (memory != wanted)
      host::fail("wrong memory: " + std::string(what) + " is in " + host::name_of(memory) + ", not in " +
                 host::name_of(wanted));
  }
  host::Memory memory = host::UB;
  uint8_t *data = nullptr;

 private:
  int64_t size = 0;
};

// -------------------------------------------------------------------------------------------- buffers and queues

template <TPosition P>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() const {
    return LocalTensor<T>(data, size, host::memory_of(P));
  }
  uint8_t *data = nullptr;
  int64_t size = 0;
};

template <TPosition P, int DEPTH>
class TQue {
 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    for (auto &slot : slots)
      if (slot.state == FREE) {
        slot.state = TAKEN;
        *host::buffer_of(slot.data) = {slot.data, slot.data + size, false, host::NO_PIPE};
        return LocalTensor<T>(slot.data, size, host::memory_of(P));
      }
    host::fail("queue: no free buffer of " + std::to_string(slots.size()));
  }
  template <typename T>
  void EnQue(const LocalTensor<T> &tensor) {
    Move(tensor.data, TAKEN, QUEUED, "EnQue of a tensor that was not allocated");
    waiting.push_back(tensor.data);
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    if (waiting.empty()) host::fail("queue: DeQue of an empty queue");
    uint8_t *data = waiting.front();
    waiting.pop_front();
    Move(data, QUEUED, TAKEN, "DeQue");
    host::buffer_of(data)->writer = host::NO_PIPE;
    return LocalTensor<T>(data, size, host::memory_of(P));
  }
  template <typename T>
  void FreeTensor(const LocalTensor<T> &tensor) {
    Move(tensor.data, TAKEN, FREE, "FreeTensor of a tensor that is not in use");
    host::buffer_of(tensor.data)->free = true;
  }

 private:
  friend class TPipe;
  enum State { FREE, TAKEN, QUEUED };
  struct Slot {
    uint8_t *data;
    State state;
  };
  void Move(uint8_t *data, State from, State to, const char *what) {
    for (auto &slot : slots)
      if (slot.data == data && slot.state == from) {
        slot.state = to;
        return;
      }
    host::fail("queue: " + std::string(what));
  }
  std::vector<Slot> slots;
  std::deque<uint8_t *> waiting;
  int64_t size = 0;
};

class TPipe {
 public:
  TPipe() { host::core().start(); }
  template <TPosition P, int DEPTH>
  void InitBuffer(TQue<P, DEPTH> &queue, int count, uint32_t bytes) {
    if (count > DEPTH) host::fail("queue: more buffers than its depth");
    if (bytes % 32) host::fail("alignment: a buffer of " + std::to_string(bytes) + " bytes");
    for (int i = 0; i < count; ++i) {
      uint8_t *data = host::core().take(host::memory_of(P), bytes);
      queue.slots.push_back({data, {}});
      host::core().buffers.push_back({data, data + bytes, true, host::NO_PIPE});
    }
    queue.size = bytes;
  }
  template <TPosition P>
  void InitBuffer(TBuf<P> &buffer, uint32_t bytes) {
    if (bytes % 32) host::fail("alignment: a buffer of " + std::to_string(bytes) + " bytes");
    buffer.data = host::core().take(host::memory_of(P), bytes);
    buffer.size = bytes;
  }
};

template <HardEvent E>
void SetFlag(int) {}
template <HardEvent E>
void WaitFlag(int) {
  auto &core = host::core();
  auto &list = core.arriving;
  if (E == HardEvent::V_S) {
    core.computing.clear();
    list.erase(std::remove_if(list.begin(), list.end(), [](const host::Range &r) { return r.read_by_vector; }), list.end());
  }
  if (E == HardEvent::S_V) core.scalar_pending = false;
  if (E == HardEvent::MTE2_S) list.clear();
}
template <pipe_t P>
void PipeBarrier() {}

// -------------------------------------------------------------------------------------------------------- copies

struct DataCopyExtParams {
  uint16_t blockCount = 1;
  uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};
template <typename T>
struct DataCopyPadExtParams {
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;
  T paddingValue{};
};
struct Nd2NzParams {
  uint16_t ndNum = 0, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0, dstNzC0Stride = 0, dstNzNStride = 0,
           dstNzMatrixStride = 0;
};

namespace host {

inline void arrives(const void *begin, int64_t bytes) {
  auto *from = static_cast<const uint8_t *>(begin);
  auto &list = core().arriving;
  list.erase(std::remove_if(list.begin(), list.end(),
                            [&](const Range &r) { return r.begin < from + bytes && from < r.end; }),
             list.end());
  list.push_back({from, from + bytes, false});
}

}  // namespace host

template <typename T>
void DataCopy(const LocalTensor<T> &to, const GlobalTensor<T> &from, uint32_t count) {
  if (count * sizeof(T) % 32) host::fail("alignment: a copy of " + std::to_string(count * sizeof(T)) + " bytes");
  std::memcpy(to.Aligned(count, 32, "a load"), from.Within(0, count, "a load"), count * sizeof(T));
  host::touches(to.data, host::LOADS, true, "a load");
  host::arrives(to.data, static_cast<int64_t>(count * sizeof(T)));
}

template <typename T>
void DataCopy(const GlobalTensor<T> &to, const LocalTensor<T> &from, uint32_t count) {
  if (count * sizeof(T) % 32) host::fail("alignment: a copy of " + std::to_string(count * sizeof(T)) + " bytes");
  std::memcpy(to.Within(0, count, "a store"), from.Aligned(count, 32, "a store"), count * sizeof(T));
  host::touches(from.data, host::STORES, false, "a store");
}

template <typename T>
void DataCopyPad(const LocalTensor<T> &to, const GlobalTensor<T> &from, const DataCopyExtParams &p,
                 const DataCopyPadExtParams<T> &) {
  int64_t width = p.blockLen / sizeof(T), rounded = (p.blockLen + 31) / 32 * 32 / static_cast<int64_t>(sizeof(T));
  int64_t source = width + p.srcStride / static_cast<int64_t>(sizeof(T));
  int64_t target = rounded + p.dstStride * 32 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < p.blockCount; ++i)
    std::memcpy(to[i * target].Aligned(rounded, 32, "a load"), from.Within(i * source, width, "a load"), p.blockLen);
  host::touches(to.data, host::LOADS, true, "a load");
  host::arrives(to.data, p.blockCount * target * static_cast<int64_t>(sizeof(T)));
}

template <typename T>
void DataCopyPad(const GlobalTensor<T> &to, const LocalTensor<T> &from, const DataCopyExtParams &p) {
  int64_t width = p.blockLen / sizeof(T), rounded = (p.blockLen + 31) / 32 * 32 / static_cast<int64_t>(sizeof(T));
  int64_t source = rounded + p.srcStride * 32 / static_cast<int64_t>(sizeof(T));
  int64_t target = width + p.dstStride / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < p.blockCount; ++i)
    std::memcpy(to.Within(i * target, width, "a store"), from[i * source].Aligned(width, 32, "a store"), p.blockLen);
  host::touches(from.data, host::STORES, false, "a store");
}

// Rows to fractals: element (n, d) goes to block d / 16 of dstNzC0Stride rows of 16.
template <typename T>
void DataCopy(const LocalTensor<T> &to, const GlobalTensor<T> &from, const Nd2NzParams &p) {
  host::only(KERNEL_TYPE_AIC_ONLY, "rows to fractals");
  to.In(host::L1, "the destination of a copy to fractals");
  host::touches(to.data, host::LOADS, true, "a copy to fractals");
  if (p.ndNum != 1 || p.dValue % 16 || p.dstNzNStride != 1) host::fail("fractals: only one matrix of whole blocks");
  T *target = to.Aligned(static_cast<int64_t>(p.dValue) / 16 * p.dstNzC0Stride * 16, 32, "a copy to fractals");
  for (int64_t n = 0; n < p.nValue; ++n)
    for (int64_t d = 0; d < p.dValue; ++d)
      target[(d / 16 * p.dstNzC0Stride + n) * 16 + d % 16] = *from.Within(n * p.srcDValue + d, 1, "a copy to fractals");
}

// ------------------------------------------------------------------------------------------------- vector pipe

namespace host {

template <typename T>
T *written(const LocalTensor<T> &to, int64_t count) {
  only(KERNEL_TYPE_AIV_ONLY, "a vector instruction");
  to.In(UB, "a vector operand");
  touches(to.data, VECTOR, true, "a vector destination");
  if (core().scalar_pending) fail("race: a vector instruction after scalar writes that were not waited for");
  T *data = to.Aligned(count, 32, "a vector destination");
  auto *begin = reinterpret_cast<const uint8_t *>(data), *end = reinterpret_cast<const uint8_t *>(data + count);
  auto &list = core().computing;
  if (!list.empty() && list.back().end == begin) {
    list.back().end = end;
  } else if (list.empty() || list.back().begin > begin || list.back().end < end) {
    list.push_back({begin, end, false});
  }
  return data;
}

template <typename T, typename U>
const T *read(const LocalTensor<T> &from, int64_t count, const LocalTensor<U> &to, int64_t out) {
  from.In(UB, "a vector operand");
  touches(from.data, VECTOR, false, "a vector source");
  const T *data = from.Aligned(count, 32, "a vector source");
  auto *begin = reinterpret_cast<const uint8_t *>(data), *end = reinterpret_cast<const uint8_t *>(data + count);
  for (auto &range : core().arriving)
    if (begin < range.end && range.begin < end) range.read_by_vector = true;
  bool same = begin == to.data && sizeof(T) == sizeof(U);
  if (!same && begin < to.data + out * static_cast<int64_t>(sizeof(U)) && to.data < end)
    fail("overlap: a vector destination lies over part of a source");
  return data;
}

template <typename F>
void binary(const LocalTensor<float> &to, const LocalTensor<float> &a, const LocalTensor<float> &b, int64_t count, F f) {
  float *out = written(to, count);
  const float *x = read(a, count, to, count), *y = read(b, count, to, count);
  for (int64_t i = 0; i < count; ++i) out[i] = f(x[i], y[i]);
}

template <typename F>
void unary(const LocalTensor<float> &to, const LocalTensor<float> &a, int64_t count, F f) {
  float *out = written(to, count);
  const float *x = read(a, count, to, count);
  for (int64_t i = 0; i < count; ++i) out[i] = f(x[i]);
}

}  // namespace host

using Local = LocalTensor<float>;
inline void Add(const Local &d, const Local &a, const Local &b, int64_t n) { host::binary(d, a, b, n, [](float x, float y) { return x + y; }); }
inline void Sub(const Local &d, const Local &a, const Local &b, int64_t n) { host::binary(d, a, b, n, [](float x, float y) { return x - y; }); }
inline void Mul(const Local &d, const Local &a, const Local &b, int64_t n) { host::binary(d, a, b, n, [](float x, float y) { return x * y; }); }
inline void Div(const Local &d, const Local &a, const Local &b, int64_t n) { host::binary(d, a, b, n, [](float x, float y) { return x / y; }); }
inline void Max(const Local &d, const Local &a, const Local &b, int64_t n) { host::binary(d, a, b, n, [](float x, float y) { return x > y ? x : y; }); }
inline void Min(const Local &d, const Local &a, const Local &b, int64_t n) { host::binary(d, a, b, n, [](float x, float y) { return x < y ? x : y; }); }
inline void Exp(const Local &d, const Local &a, int64_t n) { host::unary(d, a, n, [](float x) { return std::exp(x); }); }
inline void Ln(const Local &d, const Local &a, int64_t n) { host::unary(d, a, n, [](float x) { return std::log(x); }); }
inline void Adds(const Local &d, const Local &a, float s, int64_t n) { host::unary(d, a, n, [s](float x) { return x + s; }); }
inline void Muls(const Local &d, const Local &a, float s, int64_t n) { host::unary(d, a, n, [s](float x) { return x * s; }); }
inline void Mins(const Local &d, const Local &a, float s, int64_t n) { host::unary(d, a, n, [s](float x) { return x < s ? x : s; }); }
inline void Maxs(const Local &d, const Local &a, float s, int64_t n) { host::unary(d, a, n, [s](float x) { return x > s ? x : s; }); }

inline void Duplicate(const Local &to, float value, int64_t count) {
  std::fill_n(host::written(to, count), count, value);
}

template <typename T, typename U>
void Cast(const LocalTensor<T> &to, const LocalTensor<U> &from, RoundMode, int64_t count) {
  T *out = host::written(to, count);
  const U *in = host::read(from, count, to, count);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(static_cast<float>(in[i]));
}

inline void ReduceSum(const Local &to, const Local &from, const Local &work, int64_t count) {
  float *out = host::written(to, 1);
  host::written(work, count / 64 + 1);
  const float *in = host::read(from, count, to, 1);
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += in[i];
  *out = sum;
}

struct BrcbRepeatParams {
  uint16_t dstBlkStride = 1, dstRepStride = 8;
};
// Each of 8 numbers a repeat is spread over a block of 32 bytes.
inline void Brcb(const Local &to, const Local &from, uint8_t repeat, const BrcbRepeatParams &p) {
  int64_t out = (static_cast<int64_t>(repeat) - 1) * p.dstRepStride * 8 + (7 * p.dstBlkStride + 1) * 8;
  float *target = host::written(to, out);
  const float *in = host::read(from, repeat * 8, to, out);
  for (int64_t r = 0; r < repeat; ++r)
    for (int64_t i = 0; i < 8; ++i)
      std::fill_n(target + r * p.dstRepStride * 8 + i * p.dstBlkStride * 8, 8, in[r * 8 + i]);
}

// --------------------------------------------------------------------------------------------------- cube pipe

struct LoadData2DParams {
  uint16_t startIndex = 0;
  uint8_t repeatTimes = 0;
  uint16_t srcStride = 0;
  uint8_t sid = 0;
  uint16_t dstGap = 0;
  bool ifTranspose = false;
  uint8_t addrMode = 0;
};

// Fractals of 16 x 16 from L1 to L0A or L0B, each turned if asked for.
inline void LoadData(const LocalTensor<half> &to, const LocalTensor<half> &from, const LoadData2DParams &p) {
  host::only(KERNEL_TYPE_AIC_ONLY, "LoadData");
  from.In(host::L1, "the source of LoadData");
  if (to.memory != host::L0A && to.memory != host::L0B) host::fail("wrong memory: the destination of LoadData");
  host::touches(from.data, host::TO_L0, false, "LoadData");
  host::touches(to.data, host::TO_L0, true, "LoadData");
  for (int64_t r = 0; r < p.repeatTimes; ++r) {
    const half *in = from[(p.startIndex + r * p.srcStride) * 256].Aligned(256, 512, "a fractal of L1");
    half *out = to[r * (p.dstGap + 1) * 256].Aligned(256, 512, "a fractal of L0");
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 16; ++j) out[i * 16 + j] = p.ifTranspose ? in[j * 16 + i] : in[i * 16 + j];
  }
}

struct MmadParams {
  uint16_t m = 0, n = 0, k = 0;
  bool cmatrixInitVal = true;
};

// L0A: fractals by rows, [m][k] within; L0B: by rows of k, [n][k] within; L0C: by columns of n, [m][n] within.
inline void Mmad(const LocalTensor<float> &c, const LocalTensor<half> &a, const LocalTensor<half> &b, const MmadParams &p) {
  host::only(KERNEL_TYPE_AIC_ONLY, "Mmad");
  a.In(host::L0A, "the left operand");
  b.In(host::L0B, "the right operand");
  c.In(host::L0C, "the product");
  host::touches(a.data, host::CUBE, false, "Mmad");
  host::touches(b.data, host::CUBE, false, "Mmad");
  host::touches(c.data, host::CUBE, true, "Mmad");
  const half *left = a.Aligned(int64_t(p.m) * p.k, 512, "the left operand");
  const half *right = b.Aligned(int64_t(p.k) * p.n, 512, "the right operand");
  float *out = c.Aligned(int64_t(p.m) * p.n, 1024, "the product");
  for (int64_t m = 0; m < p.m; ++m)
    for (int64_t n = 0; n < p.n; ++n) {
      float &sum = out[(n / 16 * (p.m / 16) + m / 16) * 256 + m % 16 * 16 + n % 16];
      if (p.cmatrixInitVal) sum = 0;
      for (int64_t k = 0; k < p.k; ++k)
        sum += static_cast<float>(left[(m / 16 * (p.k / 16) + k / 16) * 256 + m % 16 * 16 + k % 16]) *
               static_cast<float>(right[(k / 16 * (p.n / 16) + n / 16) * 256 + n % 16 * 16 + k % 16]);
    }
}

struct FixpipeConfig {};
constexpr FixpipeConfig CFG_ROW_MAJOR{};
struct FixpipeParamsV220 {
  uint16_t nSize = 0, mSize = 0, srcStride = 0;
  uint32_t dstStride = 0;
  uint16_t ndNum = 1, srcNdStride = 0, dstNdStride = 0;
};

// Fractals of L0C to rows in global memory.
template <typename T, typename U, const FixpipeConfig &>
void Fixpipe(const GlobalTensor<T> &to, const LocalTensor<U> &from, const FixpipeParamsV220 &p) {
  host::only(KERNEL_TYPE_AIC_ONLY, "Fixpipe");
  from.In(host::L0C, "the source of Fixpipe");
  host::touches(from.data, host::FIX, false, "Fixpipe");
  if (p.ndNum != 1) host::fail("fractals: only one matrix");
  const U *in = from.Aligned(int64_t(p.nSize) * p.srcStride, 1024, "the source of Fixpipe");
  for (int64_t m = 0; m < p.mSize; ++m)
    for (int64_t n = 0; n < p.nSize; ++n)
      *to.Within(m * p.dstStride + n, 1, "Fixpipe") = static_cast<T>(in[(n / 16 * p.srcStride + m) * 16 + n % 16]);
}

}  // namespace AscendC

#endif
