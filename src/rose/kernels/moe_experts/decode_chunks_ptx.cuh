// Instructions of sm_90 that decode_chunks.cuh uses; tests/kernels/decode_host has the same functions for a CPU.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "tma.cuh"

namespace rose::moe_decode {

// The two words of `descriptor_swizzle128`; only the lower one, in units of 16 bytes, depends on the place.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t shared) { return (shared & 0x3FFFF) >> 4 | 64 << 16; }
__device__ __forceinline__ uint64_t whole_descriptor(uint32_t low) {
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(0x40000040));
  return descriptor;
}

}  // namespace rose::moe_decode
