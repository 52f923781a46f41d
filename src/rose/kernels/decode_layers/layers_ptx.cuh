// Instructions of sm_90 that the layers use besides those of the decode experts; tests/kernels/layers_host has the same
// functions for a CPU.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

namespace rose::layers {

__device__ __forceinline__ uint8_t* shared_memory() {
  extern __shared__ __align__(1024) uint8_t shared[];
  return shared;
}

// What blocks exchange: each word is seen whole, past the L1 cache, in no order among words.
__device__ __forceinline__ uint4 load_shared_by_all(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// The same; what the writer had ordered before by fence_for_all is seen by what follows.
__device__ __forceinline__ uint4 load_in_order(const uint4* p) {
  uint4 v;
  asm volatile("ld.acquire.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared_by_all(const uint2* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_by_all(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_for_all(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Orders what this thread wrote, and saw others write, before what it writes and reads from here on, for all blocks.
__device__ __forceinline__ void fence_for_all() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void add_one(uint64_t* sum) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(sum) : "memory");
}

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}

__device__ __forceinline__ void trap() { asm volatile("trap;"); }

__device__ __forceinline__ float exp2_fast(float v) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v));
  return e;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

__device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(~0u, v); }
__device__ __forceinline__ uint32_t warp_min(uint32_t v) { return __reduce_min_sync(~0u, v); }
__device__ __forceinline__ uint32_t shuffle_xor(uint32_t v, int d) { return __shfl_xor_sync(~0u, v, d); }
__device__ __forceinline__ float shuffle_xor(float v, int d) { return __shfl_xor_sync(~0u, v, d); }
__device__ __forceinline__ float shuffle(float v, int from) { return __shfl_sync(~0u, v, from); }

// Two numbers up to 448 as the sums of two E4M3 numbers each: the nearest, and the nearest to what is left. The first
// number is in the lower bytes.
struct Split {
  uint32_t nearest, rest;
};
__device__ __forceinline__ Split split_e4m3(float a, float b) {
  uint16_t nearest, rest;
  asm("{\n.reg .b32 both, left;\n"
      "cvt.rn.f16x2.f32 both, %3, %2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 %0, both;\n"
      "cvt.rn.f16x2.e4m3x2 left, %0;\n"
      "sub.rn.f16x2 left, both, left;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 %1, left;\n}"
      : "=&h"(nearest), "=h"(rest)
      : "f"(a), "f"(b));
  return {nearest, rest};
}

// Of each half of a word.
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
__device__ __forceinline__ uint32_t smaller_halves(uint32_t a, uint32_t b) { return __vminu2(a, b); }

// A policy for what is read once: it leaves the L2 cache first.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void bulk_load_once(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

}  // namespace rose::layers
