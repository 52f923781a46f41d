// What prefill_ptx.cuh is for prefill_fused.cuh: the instructions that only prefill_swapped.cuh needs.
#pragma once

#include <cstdint>

namespace rose::moe {

// Four matrices of 8 x 8 half words: lane l gives the address of row l % 8 of matrix l / 8 (16 bytes); word m of lane
// (g, t) is column g of rows 2t (low half) and 2t + 1 of matrix m.
__device__ __forceinline__ void store_transposed(uint32_t at, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

}  // namespace rose::moe
