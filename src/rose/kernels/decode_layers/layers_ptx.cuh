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

// What this thread's warp wrote before (and before a __syncwarp) is seen by who reads the sum with load_acquire.
__device__ __forceinline__ void add_release(int* sum, int v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(sum), "r"(v) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Adds one and says what was there; orders what this thread (and its block, by a barrier before) wrote before it, and
// what it reads after it.
__device__ __forceinline__ int add_one_ordered(int* sum) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(sum) : "memory");
  return before;
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
__device__ __forceinline__ float shuffle_xor(float v, int d) { return __shfl_xor_sync(~0u, v, d); }
__device__ __forceinline__ float shuffle(float v, int from) { return __shfl_sync(~0u, v, from); }

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

// Ask for a line of 128 bytes to be brought into the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// The address that `shared` (of this block) has in the block `rank` of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t shared, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}

__device__ __forceinline__ void store_remote(uint32_t address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

// What was stored before, here or in other blocks of the cluster, is seen by who waits with wait_cluster.
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool try_wait_cluster(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace rose::layers
