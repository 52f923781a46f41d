// Instructions of prefill attention that C++ has no words for. One file, so that a test can put a model in its place.
#pragma once

#include <cstdint>

namespace rose::attention_prefill {

__device__ __forceinline__ float exp2_mufu(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four 8x8 matrices of 16-bit elements, one after the other in `d`: lane l gives the address of row l % 8 of matrix
// l / 8 (16 bytes, aligned) and receives elements 2 (l % 4) and the next of its row l / 4.
__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// d += A B for one warp: 16 rows, 8 columns, 16 deep; fragments as those of one warp of a warpgroup (wgmma.cuh), B's
// being rows 8u + 2t and the next of column g.
__device__ __forceinline__ void multiply_bf16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void store_zeros(uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

}  // namespace rose::attention_prefill
