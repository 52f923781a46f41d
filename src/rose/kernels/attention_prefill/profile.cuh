// Where the time of consumers goes, for benchmarks/attention_variants.py --profile: built with -DROSE_PROFILE, the
// first warp of each warpgroup adds up the clocks of every phase of its loop over tiles. Otherwise nothing.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace rose::attention_prefill {

enum Phase { kData, kTurn, kScoresWait, kSoftmax, kOutputWait, kPack, kOutsideLoop, kTilesCount, kNumPhases };

#ifdef ROSE_PROFILE
constexpr bool kIsProfiled = true;

// Clocks by phase (kTilesCount: tiles), then clocks and nanoseconds of block 0.
__device__ unsigned long long profile_totals[kNumPhases + 2];

struct Profile {
  uint32_t last;
  bool is_writer;
  __device__ static uint32_t clock() {
    uint32_t now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
  }
  __device__ void start() {
    is_writer = (threadIdx.x & 127) == 0;
    last = clock();
  }
  __device__ __forceinline__ void mark(Phase phase) {
    const uint32_t now = clock();
    if (is_writer) atomicAdd(cells() + phase, now - last);
    if (is_writer && phase == kPack) atomicAdd(cells() + kTilesCount, 1);
    last = now;
  }
  __device__ static uint32_t* cells() {
    __shared__ uint32_t memory[kNumPhases];
    return memory;
  }
};

struct BlockProfile {
  long long clocks;
  unsigned long long nanoseconds;
  __device__ static unsigned long long now() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    return time;
  }
  __device__ void start() {
    if (threadIdx.x < kNumPhases) Profile::cells()[threadIdx.x] = 0;
    clocks = clock64();
    nanoseconds = now();
  }
  // All threads of the block.
  __device__ void finish() {
    __syncthreads();
    if (threadIdx.x < kNumPhases) atomicAdd(profile_totals + threadIdx.x, Profile::cells()[threadIdx.x]);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      atomicAdd(profile_totals + kNumPhases, clock64() - clocks);
      atomicAdd(profile_totals + kNumPhases + 1, now() - nanoseconds);
    }
  }
};

#else
constexpr bool kIsProfiled = false;

struct Profile {
  __device__ void start() {}
  __device__ __forceinline__ void mark(Phase) {}
};

struct BlockProfile {
  __device__ void start() {}
  __device__ void finish() {}
};

#endif

}  // namespace rose::attention_prefill

#ifdef ROSE_PROFILE
// Copy the totals to `out` and begin anew.
extern "C" int read_attention_profile(unsigned long long* out) {
  using namespace rose::attention_prefill;
  cudaError_t error = cudaMemcpyFromSymbol(out, profile_totals, sizeof(profile_totals));
  static const unsigned long long zeros[kNumPhases + 2] = {};
  return error == cudaSuccess ? cudaMemcpyToSymbol(profile_totals, zeros, sizeof(zeros)) : error;
}
#endif
