// An instruction of sm_90 that takes codes apart; tests/kernels/cuda_model has it for a CPU.
#pragma once

#include <cstdint>

namespace rose::moe {

// PRMT as it is: nvcc clears the top bit of each selector of __byte_perm, the one that replicates a byte's sign.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selectors));
  return out;
}

}  // namespace rose::moe
