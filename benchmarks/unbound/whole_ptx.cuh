// Instructions of sm_90 that whole.cuh uses; tests/kernels/decode_host has the same functions for a CPU.
#pragma once

#include <cstdint>

namespace rose::moe_decode {

// What this thread's warp wrote before (and before a __syncwarp) is seen by who reads the sum with load_acquire.
__device__ __forceinline__ void add_release(int* sum, int v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(sum), "r"(v) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}

}  // namespace rose::moe_decode
