// wgmma_fp8_registers.cuh of cuda_common on the model: the lanes of a warp show each other their fragments of A.
#pragma once

#include "wgmma_fp8.cuh"

namespace rose {

template <int kN>
inline void multiply_now(float* d, const uint32_t* a, uint64_t b, int accumulate) {
  const int lane = int(threadIdx.x) % 32;
  model::Warp& warp = model::block->warps[model::block->current / 32];
  std::memcpy(warp.fragments[lane], a, 16);
  model::warp_barrier();
  float rows[2][32];
  for (int h = 0; h < 2; ++h) {
    for (int k = 0; k < 32; ++k) {
      const uint32_t word = warp.fragments[lane / 4 * 4 + k % 16 / 4][h + 2 * (k / 16)];
      rows[h][k] = e4m3_value(uint8_t(word >> 8 * (k % 4)));
    }
  }
  model::warp_barrier();
  for (int j = 0; j < kN / 8; ++j) {
    for (int c = 0; c < 2; ++c) {
      float sums[2] = {};
      for (int k = 0; k < 32; ++k) {
        const float x = operand_e4m3(b, 8 * j + 2 * (lane % 4) + c, k);
        sums[0] += rows[0][k] * x;
        sums[1] += rows[1][k] * x;
      }
      for (int h = 0; h < 2; ++h) d[4 * j + 2 * h + c] = (accumulate ? d[4 * j + 2 * h + c] : 0.f) + sums[h];
    }
  }
}

template <int kN>
inline void wgmma_e4m3(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  float* to = d;
  const uint32_t* from = a;
  products().back().push_back([=] { multiply_now<kN>(to, from, b, accumulate); });
}

}  // namespace rose
