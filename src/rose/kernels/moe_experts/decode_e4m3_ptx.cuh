// Instructions of sm_90 that decode_e4m3.cuh uses; tests/kernels/decode_host has the same functions for a CPU.
#pragma once

#include <cstdint>

namespace rose::moe_decode {

// A thread's codes of a row, in order with waits for products.
__device__ __forceinline__ void load_codes(uint32_t (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}

// The larger magnitude of each of two pairs of bf16 (their sign bits are to be masked off).
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
  return __vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
}

__device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(~0u, v); }

// Two numbers to E4M3, nearest even, clamped to +-448; the first lands in the lower byte.
__device__ __forceinline__ uint32_t to_e4m3(float a, float b) {
  uint16_t v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(b), "f"(a));
  return v;
}

__device__ __forceinline__ float2 from_e4m3(uint32_t pair) {
  float2 v;
  asm("{\n.reg .b32 both;\n.reg .b16 low, high;\n"
      "cvt.rn.f16x2.e4m3x2 both, %2;\n"
      "mov.b32 {low, high}, both;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(v.x), "=f"(v.y)
      : "h"(static_cast<uint16_t>(pair)));
  return v;
}

}  // namespace rose::moe_decode
