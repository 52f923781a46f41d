// What the lanes of a warp have in common. Plain C++ over intrinsics: tests compile it as it is on their models.
#pragma once

#include "mbarrier.cuh"

namespace rose {

// What lane 0 has: tells the compiler that a value is the same in all lanes, so that control that hangs on it needs no
// reconvergence and addresses live in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Whether this lane arrives for its warp: mbarrier_arrive_warp, the lane known beforehand.
__device__ __forceinline__ bool is_arriving() { return kWarpArrivals > 1 || threadIdx.x % 32 == 0; }

}  // namespace rose
