// What the lanes of a warp have in common, and what they exchange. Plain C++ over intrinsics: tests compile it as it is
// on their model of the machine.
#pragma once

#include "mbarrier.cuh"

namespace rose {

// What lane 0 has: tells the compiler that a value is the same in all lanes, so that control that hangs on it needs no
// reconvergence and addresses live in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Whether this lane arrives for its warp: mbarrier_arrive_warp, the lane known beforehand.
__device__ __forceinline__ bool is_arriving() { return kWarpArrivals > 1 || threadIdx.x % 32 == 0; }

// Four words of each of four lanes that lie `step` apart, transposed: lane q of them receives word q of lanes 0..3.
__device__ __forceinline__ void transpose_lanes(uint32_t (&w)[4], int q, int step) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t got = __shfl_xor_sync(~0u, (q & 1) ? w[i] : w[i + 1], step);
    if (q & 1) w[i] = got;
    else w[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t got = __shfl_xor_sync(~0u, (q & 2) ? w[i] : w[i + 2], 2 * step);
    if (q & 2) w[i] = got;
    else w[i + 2] = got;
  }
}

__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int q) { transpose_lanes(w, q, 1); }

}  // namespace rose
