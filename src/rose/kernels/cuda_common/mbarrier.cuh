// Barriers and fences of sm_90: mbarrier objects in shared memory, named barriers, register hand-over.
// Source: PTX ISA, "Parallel Synchronization and Communication Instructions".
#pragma once

#include <cstdint>

namespace rose {

// Build with -DROSE_WATCHDOG for check runs: a wait of more than two seconds traps, so that a deadlock becomes a
// CUDA error.
#ifdef ROSE_WATCHDOG
constexpr bool kWatchdog = true;
#else
constexpr bool kWatchdog = false;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the inits and before the block-wide barrier: makes them visible to the copy engine too.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// What a warp did before __syncwarp() is told by one lane's arrival: __syncwarp orders it before the release. racecheck
// of compute-sanitizer follows an mbarrier only from thread to thread, so that a build for it lets every lane arrive.
#ifdef ROSE_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// After __syncwarp(): this warp's arrival, kWarpArrivals of those that the barrier was made with.
__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier, int lane) {
  if (kWarpArrivals > 1 || lane == 0) mbarrier_arrive(barrier);
}

// One arrival that also announces `bytes` which copies will complete.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Wait until the phase of the given parity has completed. A fresh barrier is in phase 0: waiting for parity 1
// returns at once, which is how a producer passes its first round over empty stages.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  if constexpr (kWatchdog) {
    // In assembly and with no words: a call, or a branch to a trap, would make ptxas serialise every wgmma in flight
    // across the wait, and the check build would no longer check the pipeline.
    asm volatile(
        "{\n.reg .pred p;\n.reg .u64 begin, now;\n"
        "mov.u64 begin, %%globaltimer;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\n"
        "mov.u64 now, %%globaltimer;\n"
        "sub.u64 now, now, begin;\n"
        "setp.gt.u64 p, now, 2000000000;\n"
        "@p trap;\n"
        "bra WAIT;\n"
        "DONE:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  } else {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
  }
}

// Named barriers 1..15 (0 is __syncthreads). `threads` counts all that sync or arrive, a multiple of 32.
__device__ __forceinline__ void named_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Giving shared memory back to the copy engine after it was read by ld.shared or ldmatrix.
//
// HAZARD: a load is only issued before a barrier that follows it; its registers are filled later, and nothing but an
// instruction that uses them waits for that (by the load's scoreboard). The compiler puts no wait before a barrier:
// ordinary stores after it queue up behind the loads, so that it needs none. The copy engine does not queue up there.
// Where other warps' loads from memory hold up a load from shared memory for longer than a copy takes, it reads what
// the copy wrote: seen in a few of a hundred thousand numbers of decode experts. __syncwarp() waits for no load
// either. So the barrier itself has to use what was read: `words`, one of each load, since a load's registers share a
// scoreboard, and a scoreboard belongs to the warp: one lane may arrive for it. aot_reads.py looks for it in the
// machine code.
template <class... Words>
__device__ __forceinline__ uint32_t mix(Words... words) {
  return (words ^ ...);
}

// named_sync, not passed before `words` have arrived: its predicate is made from them, its result is nobody's.
template <class... Words>
__device__ __forceinline__ void named_sync_after(uint32_t id, uint32_t threads, Words... words) {
  asm volatile("{\n.reg .pred p, q;\nsetp.eq.b32 p, %2, 1;\nbar.red.or.pred q, %0, %1, p;\n}" ::"r"(id), "r"(threads),
               "r"(mix(words...))
               : "memory");
}

// mbarrier_arrive, not before `words` have arrived: one of two, whichever of them they choose.
template <class... Words>
__device__ __forceinline__ void mbarrier_arrive_after(uint32_t barrier, Words... words) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 state;\nsetp.eq.b32 p, %1, 1;\n"
      "@p mbarrier.arrive.shared::cta.b64 state, [%0];\n@!p mbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier),
      "r"(mix(words...))
      : "memory");
}

// Clusters: blocks that see each other's shared memory.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Ordinary stores to shared memory before it, tensor cores and copy engine after it (and a barrier).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Hand registers between warpgroups. LIMIT: ptxas ignores these (warning C7508) unless the kernel has
// __launch_bounds__(threads, 1) and each role is one branch of a single if/else.
template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace rose
