// What the AscendC kernels of this folder share. Compiled by CANN on an NPU machine, and for its arithmetic by any
// C++17 compiler against the host header of our tests. SHAPE.H holds the constants of one shape.
#ifndef LATENTSCAN_ASCENDC_COMMON_H
#define LATENTSCAN_ASCENDC_COMMON_H

#include "kernel_operator.h"
#include "shape.h"

namespace latentscan {

using AscendC::GlobalTensor;
using AscendC::LocalTensor;
using AscendC::TBuf;
using AscendC::TPipe;
using AscendC::TPosition;
using AscendC::TQue;

constexpr uint32_t UB_BYTES = 192 * 1024;
constexpr uint32_t LANES = 8;  // fp32 numbers in a block of 32 bytes

// The runtime sizes, the same for all kernels of a chunk scan; 64-bit words in this order, see emit.py.
struct Tiling {
  int64_t batch, tokens, chunks, x_batch, x_token, bc_batch, bc_token, z_batch, z_token;
};

__aicore__ inline Tiling ReadTiling(GM_ADDR address) {
  Tiling tiling;
  const __gm__ int64_t *from = reinterpret_cast<const __gm__ int64_t *>(address);
  int64_t *to = reinterpret_cast<int64_t *>(&tiling);
  for (uint32_t i = 0; i < sizeof(Tiling) / sizeof(int64_t); ++i) to[i] = from[i];
  return tiling;
}

template <typename T>
__aicore__ inline GlobalTensor<T> Global(GM_ADDR address, int64_t elements) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(address), static_cast<uint64_t>(elements));
  return tensor;
}

// The vector pipe has to be done before a scalar read of what it wrote, and the other way round.
__aicore__ inline void VectorThenScalar() {
  AscendC::SetFlag<AscendC::HardEvent::V_S>(EVENT_ID0);
  AscendC::WaitFlag<AscendC::HardEvent::V_S>(EVENT_ID0);
}

__aicore__ inline void ScalarThenVector() {
  AscendC::SetFlag<AscendC::HardEvent::S_V>(EVENT_ID0);
  AscendC::WaitFlag<AscendC::HardEvent::S_V>(EVENT_ID0);
}

__aicore__ inline void ScalarThenStore() {
  AscendC::SetFlag<AscendC::HardEvent::S_MTE3>(EVENT_ID0);
  AscendC::WaitFlag<AscendC::HardEvent::S_MTE3>(EVENT_ID0);
}

// Input data has arrived before a scalar read.
__aicore__ inline void LoadThenScalar() {
  AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(EVENT_ID0);
  AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(EVENT_ID0);
}

// `count` rows of `width` elements, `stride` elements apart, to rows of the same width one after the other.
template <typename T>
__aicore__ inline void LoadRows(const LocalTensor<T> &to, const GlobalTensor<T> &from, uint32_t count, uint32_t width,
                                int64_t stride) {
  AscendC::DataCopyExtParams rows{static_cast<uint16_t>(count), static_cast<uint32_t>(width * sizeof(T)),
                                  static_cast<uint32_t>((stride - width) * static_cast<int64_t>(sizeof(T))), 0, 0};
  AscendC::DataCopyPadExtParams<T> padding{false, 0, 0, static_cast<T>(0)};
  AscendC::DataCopyPad(to, from, rows, padding);
}

template <typename T>
__aicore__ inline void StoreRows(const GlobalTensor<T> &to, const LocalTensor<T> &from, uint32_t count, uint32_t width,
                                 int64_t stride) {
  AscendC::DataCopyExtParams rows{static_cast<uint16_t>(count), static_cast<uint32_t>(width * sizeof(T)), 0,
                                  static_cast<uint32_t>((stride - width) * static_cast<int64_t>(sizeof(T))), 0};
  AscendC::DataCopyPad(to, from, rows);
}

// log(1 + exp(v)) in place, linear above 20; a, b: scratch of the same size.
__aicore__ inline void Softplus(const LocalTensor<float> &v, const LocalTensor<float> &a, const LocalTensor<float> &b,
                                uint32_t count) {
  AscendC::Mins(a, v, 20.0f, count);
  AscendC::Adds(v, v, -20.0f, count);
  AscendC::Maxs(v, v, 0.0f, count);  // what lies above 20
  AscendC::Exp(a, a, count);         // e
  AscendC::Adds(b, a, 1.0f, count);  // u = 1 + e, rounded
  AscendC::Adds(b, b, -1.0f, count);
  AscendC::Maxs(b, b, 1.0e-30f, count);
  AscendC::Div(a, a, b, count);      // e / (u - 1) takes the rounding of u back
  AscendC::Adds(b, b, 1.0f, count);
  AscendC::Ln(b, b, count);
  AscendC::Mul(a, a, b, count);
  AscendC::Add(v, v, a, count);
}

// x = x * v * sigmoid(v); v and scratch are lost.
__aicore__ inline void Gate(const LocalTensor<float> &x, const LocalTensor<float> &v, const LocalTensor<float> &scratch,
                            uint32_t count) {
  AscendC::Mul(x, x, v, count);
  AscendC::Muls(scratch, v, -1.0f, count);
  AscendC::Mins(scratch, scratch, 88.0f, count);
  AscendC::Exp(scratch, scratch, count);
  AscendC::Adds(scratch, scratch, 1.0f, count);
  AscendC::Div(x, x, scratch, count);
}

}  // namespace latentscan

#endif
