// Instructions of sm_90 that draw_cluster.cuh uses; tests/kernels/draw_host has the same functions for a CPU.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "launch.cuh"
#include "mbarrier.cuh"

namespace rose::draw {

__device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(~0u, v); }
__device__ __forceinline__ unsigned ballot(bool v) { return __ballot_sync(~0u, v); }
template <class T>
__device__ __forceinline__ T shuffle(T v, int from) {
  return __shfl_sync(~0u, v, from);
}
template <class T>
__device__ __forceinline__ T shuffle_xor(T v, int d) {
  return __shfl_xor_sync(~0u, v, d);
}
template <class T>
__device__ __forceinline__ T shuffle_up(T v, int d) {
  return __shfl_up_sync(~0u, v, d);
}

// Relative error of 2^-22.
__device__ __forceinline__ float exp2_fast(float v) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v));
  return e;
}
__device__ __forceinline__ float exp_fast(float v) { return exp2_fast(v * 1.4426950408889634f); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ void count_one(uint32_t* bin) { atomicAdd(bin, 1u); }

// The same place in the shared memory of another block of the cluster.
template <class T>
__device__ __forceinline__ T* remote(T* p, uint32_t rank) {
  uint64_t there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(reinterpret_cast<uint64_t>(p)), "r"(rank));
  return reinterpret_cast<T*>(there);
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float4 load_vector(const float* p) { return __ldcs(reinterpret_cast<const float4*>(p)); }
__device__ __forceinline__ float4 load_vector(const __nv_bfloat16* p) {
  const uint2 v = __ldcs(reinterpret_cast<const uint2*>(p));
  return float4{__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
                __uint_as_float(v.y & 0xFFFF0000u)};
}

}  // namespace rose::draw
