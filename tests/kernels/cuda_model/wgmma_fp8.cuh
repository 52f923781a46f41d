// wgmma_fp8.cuh of cuda_common on the model: as in wgmma.cuh, a product is made when it is waited for.
#pragma once

#include "wgmma.cuh"

namespace rose {

inline float e4m3_value(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float magnitude = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return bits & 128 ? -magnitude : magnitude;
}

// Byte k of a row, k < 32, of an operand that begins at a descriptor.
inline float operand_e4m3(uint64_t descriptor, int row, int k) {
  static float values[256];
  if (values[8] == 0.f) {
    for (int i = 0; i < 256; ++i) values[i] = e4m3_value(uint8_t(i));
  }
  uint32_t address = (uint32_t(descriptor) << 4) + row / 8 * 1024 + row % 8 * 128 + k;
  address ^= (address >> 7 & 7) << 4;
  if (model::block->is_unfenced[address - model::kShift]) model::fail("the tensor core reads what is not fenced");
  return values[*model::at(address, 1)];
}

template <int kN>
inline void multiply_now(float* d, uint64_t a, uint64_t b, int accumulate) {
  const int thread = int(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
  float rows[2][32];
  for (int h = 0; h < 2; ++h) {
    for (int k = 0; k < 32; ++k) rows[h][k] = operand_e4m3(a, 16 * warp + 8 * h + lane / 4, k);
  }
  for (int j = 0; j < kN / 8; ++j) {
    for (int c = 0; c < 2; ++c) {
      float sums[2] = {};
      for (int k = 0; k < 32; ++k) {
        const float w = operand_e4m3(b, 8 * j + 2 * (lane % 4) + c, k);
        sums[0] += rows[0][k] * w;
        sums[1] += rows[1][k] * w;
      }
      for (int h = 0; h < 2; ++h) d[4 * j + 2 * h + c] = (accumulate ? d[4 * j + 2 * h + c] : 0.f) + sums[h];
    }
  }
}

template <int kN>
inline void wgmma_e4m3(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
  float* to = d;
  products().back().push_back([=] { multiply_now<kN>(to, a, b, accumulate); });
}

inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  const float all[4] = {a, b, c, d};
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(__nv_cvt_float_to_fp8(all[i], __NV_SATFINITE, __NV_E4M3)) << 8 * i;
  return out;
}

}  // namespace rose
