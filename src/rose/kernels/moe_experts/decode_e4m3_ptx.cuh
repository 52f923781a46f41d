// Instructions of sm_90 that decode_e4m3.cuh uses; tests/kernels/decode_host has the same functions for a CPU.
#pragma once

#include <cstdint>

namespace rose::moe_decode {

// Four matrices of 8 rows by 16 bytes; lane i gives the address of row i % 8 of matrix i / 8. Lane 4g + t gets bytes
// 4t to 4t + 3 of row g of each.
__device__ __forceinline__ uint4 load_matrices(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// The larger magnitude of each of two pairs of bf16 (their sign bits are to be masked off).
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
  return __vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
}

__device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(~0u, v); }

// Keeps what computes `v` from moving behind what follows.
__device__ __forceinline__ void settle_words(uint32_t (&v)[2][4]) {
  asm volatile("" : "+r"(v[0][0]), "+r"(v[0][1]), "+r"(v[0][2]), "+r"(v[0][3]), "+r"(v[1][0]), "+r"(v[1][1]),
                    "+r"(v[1][2]), "+r"(v[1][3]));
}

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
  static_assert(kN == 8 || kN == 16 || kN == 24, "width without a wrapper");
  if constexpr (kN == 8) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, %8, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0));
  } else if constexpr (kN == 16) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0));
  } else {
    asm volatile(
        "{\n.reg .pred p;\n"
        "setp.ne.b32 p, %17, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, %16, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0));
  }
}

}  // namespace rose::moe_decode
