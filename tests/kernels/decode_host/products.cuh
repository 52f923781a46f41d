// The products of moe_experts/decode_ptx.cuh on a CPU, wherever shared memory lies.
#pragma once

#include "launch.cuh"

namespace rose::moe_decode {

inline float low_of(uint32_t v) { return __uint_as_float(v << 16); }
inline float high_of(uint32_t v) { return __uint_as_float(v & 0xFFFF0000u); }

// Source: PTX ISA, fragments of mma.m16n8k16. Lane 4g + t has rows g, g + 8 of A, column g of B, columns 2t, 2t + 1 of C.
inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  Warp& w = my_warp();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(w.slots[lane], mine, sizeof mine);
  w.step.arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    const int row = i >> 1, column = 2 * t + (i & 1);
    for (int k = 0; k < 4; ++k) {
      const uint32_t* a = w.slots[4 * g + k];
      const uint32_t* b = w.slots[4 * column + k];
      for (int half = 0; half < 2; ++half) {
        c[i] += low_of(a[row + 2 * half]) * low_of(b[4 + half]) + high_of(a[row + 2 * half]) * high_of(b[4 + half]);
      }
    }
  }
  w.step.arrive_and_wait();
}

inline uint32_t multiply(uint32_t a, uint32_t b) {
  const uint32_t low = __float2bfloat16(low_of(a) * low_of(b)).bits;
  return low | uint32_t(__float2bfloat16(high_of(a) * high_of(b)).bits) << 16;
}

}  // namespace rose::moe_decode
