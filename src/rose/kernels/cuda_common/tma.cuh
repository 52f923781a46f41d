// Bulk tensor copies (TMA) from global to shared memory. One thread issues a copy, which completes bytes on an mbarrier.
// Source: PTX ISA, "cp.async.bulk.tensor". Coordinates are elements, innermost first; signed, and what lies
// outside the tensor is zero (its bytes are counted all the same).
// LIMIT: the innermost coordinate has to be a multiple of 16 bytes; any other ends in cudaErrorIllegalInstruction.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace rose {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

__device__ __forceinline__ void tma_load_2d(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x,
                                            int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void tma_load_3d(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x,
                                            int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

}  // namespace rose
