// The functions of moe_experts/decode_e4m3_ptx.cuh on a CPU.
#pragma once

#include "wgmma.cuh"

namespace rose::moe_decode {

template <int kWords>
void load_codes(uint32_t (&v)[kWords], uint32_t address) {
  if (address % (4 * kWords)) std::abort();
  std::memcpy(v, place(address), 4 * kWords);
}

inline uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
  const uint32_t low = std::max(a & 0x7FFF, b & 0x7FFF), high = std::max(a >> 16 & 0x7FFF, b >> 16 & 0x7FFF);
  return low | high << 16;
}
inline uint32_t warp_max(uint32_t v) {
  const std::array<uint32_t, 32> all = gather(v);
  return *std::max_element(all.begin(), all.end());
}

// Source: OCP 8-bit floating point specification: exponent bias 7, subnormals in steps of 2^-9, NaN 0x7F.
inline float find_e4m3(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 0x7F) == 0x7F) return NAN;
  const float magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return byte & 0x80 ? -magnitude : magnitude;
}
inline float value_of_e4m3(uint32_t byte) {
  static const std::vector<float> values = [] {
    std::vector<float> found;
    for (uint32_t i = 0; i < 256; ++i) found.push_back(find_e4m3(i));
    return found;
  }();
  return values[byte];
}
inline uint32_t nearest_e4m3(float v) {
  if (v != v) return 0x7F;
  const float magnitude = std::min(std::fabs(v), 448.0f);
  const int exponent = std::max(magnitude == 0 ? -9 : std::ilogb(magnitude), -6);
  const float rounded = std::ldexp(std::nearbyint(std::ldexp(magnitude, 3 - exponent)), exponent - 3);
  uint32_t byte = 0;
  while (value_of_e4m3(byte) != rounded) ++byte;  // 0 to 448 come before NaN
  return byte | (std::signbit(v) ? 0x80 : 0);
}
inline uint32_t to_e4m3(float a, float b) { return nearest_e4m3(a) | nearest_e4m3(b) << 8; }
inline float2 from_e4m3(uint32_t pair) { return {value_of_e4m3(pair & 0xFF), value_of_e4m3(pair >> 8 & 0xFF)}; }

}  // namespace rose::moe_decode
