// Grouped FP8 product for Hopper: weights may be MXFP4, expanded to E4M3 on their way to the tensor
// core; tiles of 256 rows; what a tile needs besides its operands travels with its first stage.
//
// Roles of a persistent block: two warpgroups multiply (here and prefill_fused_store.cuh); with MXFP4 the four warps of a third expand weights; of the
// last, warp 0 fills the ring of stages by TMA and warp 1 the ring of packed weights (prefill_fused_fill.cuh).
// A stage: rows of A, columns of W as the 128-byte swizzle wants them, scales of A, the tile's place and its bias.
//   rows     slab h holds rows 64h .. 64h + 63 of the tile; consumer c multiplies slabs c, c + 2. A slab without
//            rows is neither loaded nor multiplied, so that a short tile costs what its slabs cost.
//   pieces   a consumer holds two accumulators of 64 x 128: two slabs of one run of 128 columns (tile 256 x 128), or
//            one slab of two runs (tile 128 x 256). Only one piece of unscaled sums is live.
//   passes   the SwiGLU's scale covers 128 channels, so 256 columns. A tile 256 x 128 takes them in two passes over K;
//            the channels of the first wait in shared memory as fp16 (they are at most limit (limit + 1)).
// Expansion per stage: 16384 codes, about 75 instructions per warp and 1024 codes, under the 1024 tensor-core clocks of
// two slabs per consumer.
#pragma once

#include "prefill_fused_fill.cuh"
#include "prefill_fused_store.cuh"

namespace rose::moe::fused {

// One stage: kSteps products of 32 along K for each piece, and their sums into `total`.
template <typename P, int kSteps>
__device__ __forceinline__ void multiply(float (&total)[2][64], uint64_t a, uint64_t w, uint32_t a_scales,
                                         uint32_t w_scales, int pieces, uint32_t empty) {
  float part[64];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (s >= pieces) break;
    const float scale0 = load_shared(a_scales + (P::kSlabs == 2 ? s * kScalePitch : 0));
    const float scale1 = load_shared(a_scales + (P::kSlabs == 2 ? s * kScalePitch : 0) + 32);
    const float w_scale = load_shared(w_scales + (P::kRuns == 2 ? 4 * s : 0));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      wgmma_e4m3<128>(part, advance(a, (P::kSlabs == 2 ? s * 2 * kSlabBytes : 0) + step * 32),
                      advance(w, (P::kRuns == 2 ? s * kColumns * kBlockK : 0) + step * 32), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    settle(part);
    if (s == pieces - 1) {
      __syncwarp();
      if (is_arriving()) mbarrier_arrive(empty);
    }
    const float c0 = scale0 * w_scale, c1 = scale1 * w_scale;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      total[s][4 * j] += part[4 * j] * c0;
      total[s][4 * j + 1] += part[4 * j + 1] * c0;
      total[s][4 * j + 2] += part[4 * j + 2] * c1;
      total[s][4 * j + 3] += part[4 * j + 3] * c1;
    }
  }
}

// Sums start at the bias, which the tile's first stage carries. ROSE_NO_BIAS and ROSE_WHOLE_TAIL measure what two
// choices cost (benchmarks/design_points.py): sums that start at zero, a last half stage that is multiplied whole.
template <typename P>
__device__ __forceinline__ void seed(float (&total)[2][64], uint32_t bias, int q) {
#ifdef ROSE_NO_BIAS
#pragma unroll
  for (int j = 0; j < 64; ++j) total[0][j] = total[1][j] = 0.f;
#else
#pragma unroll
  for (int s = 0; s < P::kRuns; ++s) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      uint32_t pair[2];
      load_shared(pair, bias + 4 * (kColumns * s + 8 * j + 2 * q));
      total[s][4 * j] = total[s][4 * j + 2] = __uint_as_float(pair[0]);
      total[s][4 * j + 1] = total[s][4 * j + 3] = __uint_as_float(pair[1]);
    }
  }
  if constexpr (P::kRuns == 1) {
#pragma unroll
    for (int j = 0; j < 64; ++j) total[1][j] = total[0][j];
  }
#endif
}

// Wait for a stage and multiply it. `scales_at`: where this thread's scales of A are beside the stage.
template <typename P, int kSteps>
__device__ __forceinline__ void stage(float (&total)[2][64], const Shared& at, const Cursor<P::kStages>& ring,
                                      uint32_t scales_at, int pieces, int consumer) {
  const uint32_t a = at.base + ring.stage * P::kStageBytes;
  const uint32_t aside = at.base + P::kAside + ring.stage * P::kAsideBytes;
  mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
  multiply<P, kSteps>(total, descriptor_swizzle128(a + consumer * kSlabBytes), descriptor_swizzle128(a + P::kABytes),
                      aside + scales_at, aside + P::kWScalesAt, pieces, at.empty + 8 * ring.stage);
}

template <typename P>
__device__ __forceinline__ int pieces_of(const Problem& p, const Place& place, int consumer) {
  const int mine = place.rows - consumer * kSlab;  // rows from this consumer's first slab on
  if (mine <= 0) return 0;
  if constexpr (P::kSlabs == 2) return mine > 2 * kSlab ? 2 : 1;
  else return place.column + kColumns < p.n ? 2 : 1;
}

template <typename P>
__device__ __forceinline__ void consume(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK, k_full = p.k / kBlockK;
  const int consumer = uniform(threadIdx.x / 128);
  Cursor<P::kStages> ring;
  for (int round = 0; item_of_round(round) < num_items; ++round) {
    for (int pass = 0; pass < P::kPasses; ++pass) {
      mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
      const uint32_t aside = at.base + P::kAside + ring.stage * P::kAsideBytes;
      Place place = load_place(aside + P::kPlaceAt);
      place = {uniform(place.expert), uniform(place.row), uniform(place.rows), uniform(place.column)};
      const int pieces = pieces_of<P>(p, place, consumer);
      const bool is_last = place.column + P::kWide >= p.n;
      if (pieces == 0) {
        for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
          mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
          __syncwarp();
          if (is_arriving()) mbarrier_arrive(at.empty + 8 * ring.stage);
        }
      } else {
        __syncwarp();  // every lane has read the place of the tile before
        store_place(at.places + 16 * (threadIdx.x / 32), place);
        const uint32_t scales_at = 4 * (row_of(threadIdx.x) + (place.row & 3));
        float total[2][64];
        seed<P>(total, aside + P::kBiasAt, threadIdx.x % 4);
        settle(total[0]);
        settle(total[1]);
        // The last half stage is apart: with a choice inside the loop ptxas spills one piece of `total`.
        for (int kb = 0; kb < k_full; ++kb, ring.advance()) {
          stage<P, 4>(total, at, ring, scales_at, pieces, consumer);
        }
        if (k_full < k_blocks) {
#ifdef ROSE_WHOLE_TAIL
          stage<P, 4>(total, at, ring, scales_at, pieces, consumer);
#else
          stage<P, 2>(total, at, ring, scales_at, pieces, consumer);
#endif
          ring.advance();
        }
        const int thread = thread_again();
        const Place same = load_place(at.places + 16 * (thread / 32));
        if constexpr (P::kGateUp) {
          store_hidden<P>(total, p, same, thread, pieces, at.base + P::kParked, pass == 1);
        } else {
          store_rows<P>(total, p, same, thread, pieces);
        }
      }
      if (P::kPasses == 2 && is_last) break;
    }
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1) product(const __grid_constant__ Problem p) {
  extern __shared__ uint8_t raw[];
  Shared at;
  at.base = (shared_address(raw) + 1023) & ~1023u;
  at.full = at.base + P::kBarriers;
  at.empty = at.full + 8 * P::kStages;
  at.packed_full = at.empty + 8 * P::kStages;
  at.packed_empty = at.packed_full + 8 * kPackedStages;
  at.places = at.base + P::kPlaces;
  if (threadIdx.x == 0) {
    for (int i = 0; i < P::kStages; ++i) {
      mbarrier_init(at.full + 8 * i, (P::kMxfp4 ? 5 : 1) * kWarpArrivals);  // the filling warp, four expanding warps
      mbarrier_init(at.empty + 8 * i, 8 * kWarpArrivals);                   // eight multiplying warps
    }
    for (int i = 0; i < kPackedStages; ++i) {
      mbarrier_init(at.packed_full + 8 * i, 1);  // one lane, which wrote what is not copied
      mbarrier_init(at.packed_empty + 8 * i, 4 * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  if (P::kMxfp4 && threadIdx.x < kLutEntries) {
    const float unit = __uint_as_float(uint32_t(int(threadIdx.x) - 40 + 127) << 23);
    const uint32_t entry = at.base + P::kLut + 8 * threadIdx.x;
    store_shared(entry, pack_e4m3(0.f, 0.5f * unit, unit, 1.5f * unit));
    store_shared(entry + 4, pack_e4m3(2.f * unit, 3.f * unit, 4.f * unit, 6.f * unit));
  }
  __syncthreads();
  const int runs = (p.n + P::kItemColumns - 1) / P::kItemColumns;
  const int num_items = uniform(__ldg(p.rows.tiles + p.rows.num_experts) * runs);
  if constexpr (P::kMxfp4) {
    if (threadIdx.x < 256) {
      registers_grow<224>();
      consume<P>(p, num_items, at);
    } else if (threadIdx.x < 384) {
      registers_shrink<32>();
      expand<P>(p, num_items, at);
    } else {
      registers_shrink<32>();
      if (threadIdx.x < 416) fill_stages<P>(p, num_items, at);
      else if (threadIdx.x < 448) fill_packed<P>(p, num_items, at);
    }
  } else {
    if (threadIdx.x < 256) {
      registers_grow<232>();
      consume<P>(p, num_items, at);
    } else {
      registers_shrink<40>();
      if (threadIdx.x < 288) fill_stages<P>(p, num_items, at);
    }
  }
}

// Tensor maps and launch. `rows` bounds the rows of A.
template <typename P>
cudaError_t launch(Problem p, const void* a, const float* a_scales, int a_scales_stride, const void* w, int rows,
                   int max_tiles, cudaStream_t stream) {
  const uint64_t a_sizes[2] = {uint64_t(p.k), uint64_t(rows)}, a_strides[1] = {uint64_t(p.k)};
  const uint32_t a_box[2] = {kBlockK, kSlab};
  const uint64_t scale_sizes[2] = {uint64_t(rows), uint64_t((p.k + 127) / 128)};
  const uint64_t scale_strides[1] = {uint64_t(a_scales_stride) * 4};
  const uint32_t scale_box[2] = {kScaleBox, 1};
  const uint64_t row_bytes = uint64_t(P::kMxfp4 ? p.k / 2 : p.k);
  const uint64_t w_sizes[3] = {row_bytes, uint64_t(p.n), uint64_t(p.rows.num_experts)};
  const uint64_t w_strides[2] = {row_bytes, row_bytes * uint64_t(p.n)};
  const uint32_t w_box[3] = {P::kMxfp4 ? kBlockK / 2 : kBlockK, P::kWide, 1};
  cudaError_t error = encode_tensor_map(&p.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, a, a_sizes, a_strides, a_box,
                                        CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map(&p.a_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, a_scales, scale_sizes, scale_strides,
                            scale_box, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map(&p.w, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, w, w_sizes, w_strides, w_box,
                            P::kMxfp4 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  static const cudaError_t allowed = cudaFuncSetAttribute(
      product<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  const int64_t items = int64_t(max_tiles) * ((p.n + P::kItemColumns - 1) / P::kItemColumns);
  product<P><<<persistent_blocks(items), P::kThreads, P::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace rose::moe::fused
