// Instructions of sm_90 that decode_e4m3.cuh uses; tests/kernels/decode_host has the same functions for a CPU.
#pragma once

#include <cstdint>

#include "wgmma_fp8_registers.cuh"

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

// d (+)= A B of 32 columns: A (64 rows) in registers, B (kN rows) in shared memory; kAdds false overwrites d.
template <int kN, bool kAdds>
__device__ __forceinline__ void wgmma_e4m3_narrow(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kN == 16 || kN == 32 || kN == 48, "width without a wrapper");
  if constexpr (kN == 16) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0));
  } else {
    wgmma_e4m3<kN>(d, a, b, kAdds ? 1 : 0);
  }
}

}  // namespace rose::moe_decode
