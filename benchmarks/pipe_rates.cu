// How many clocks a scheduler of this GPU takes per warp instruction of the kinds that attention's softmax is made of.
#include "launch.cuh"

namespace {

constexpr int kChains = 8, kRounds = 512;

enum Kind { kEx2, kEx2Half, kFma, kMax, kMax3, kPack, kShuffle, kNumKinds };

template <int kKind>
__device__ __forceinline__ void step(uint32_t& x, uint32_t y) {
  if constexpr (kKind == kEx2) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+r"(x));
  if constexpr (kKind == kEx2Half) asm volatile("ex2.approx.ftz.bf16x2 %0, %0;" : "+r"(x));
  if constexpr (kKind == kFma) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+r"(x) : "r"(y));
  if constexpr (kKind == kMax) asm volatile("max.f32 %0, %0, %1;" : "+r"(x) : "r"(y));
  if constexpr (kKind == kMax3) {  // ptxas makes one instruction of the two
    asm volatile("max.s32 %0, %0, %1;\nmax.s32 %0, %0, %2;" : "+r"(x) : "r"(y), "r"(threadIdx.x));
  }
  if constexpr (kKind == kPack) asm volatile("cvt.rn.bf16x2.f32 %0, %0, %1;" : "+r"(x) : "r"(y));
  if constexpr (kKind == kShuffle) x = __shfl_xor_sync(~0u, x, 1);
}

template <int kKind>
__global__ void time_steps(uint32_t* out, uint32_t seed) {
  uint32_t x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = seed + threadIdx.x * kChains + i;
  __syncthreads();
  const long long begin = clock64();
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) step<kKind>(x[i], seed);
  }
  __syncthreads();  // a pipe may serve one warp before others: the last one counts
  const long long clocks = clock64() - begin;
  for (int i = 1; i < kChains; ++i) x[0] ^= x[i];
  if (threadIdx.x == 0) out[kKind] = uint32_t(clocks);
  if (x[0] == 0x12345678) out[kNumKinds] = 1;  // so that nothing is optimised away
}

template <int kKind>
cudaError_t time_from(uint32_t* out, cudaStream_t stream) {
  if constexpr (kKind == kNumKinds) {
    return cudaGetLastError();
  } else {
    time_steps<kKind><<<1, 512, 0, stream>>>(out, 3);  // four warps to a scheduler
    return time_from<kKind + 1>(out, stream);
  }
}

}  // namespace

// Write the clocks of 4 * kChains * kRounds warp instructions for each kind to `out` (kNumKinds + 1 words).
extern "C" int launch_pipe_rates(uint32_t* out, cudaStream_t stream) { return time_from<0>(out, stream); }
