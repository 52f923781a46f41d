// The warp that fills the stages of prefill_swapped.cuh.
#pragma once

#include "prefill_swapped_plan.cuh"
#include "ring.cuh"

namespace rose::moe::swapped {

__device__ __forceinline__ void load_bias(float (&bias)[kItemRows / 32], const Problem& p, const Place& place, int lane) {
#pragma unroll
  for (int i = 0; i < kItemRows / 32; ++i) {
    const size_t at = size_t(place.expert) * p.n + min(place.column + 32 * i + lane, p.n - 1);
    bias[i] = p.bias_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[at])
                             : static_cast<const float*>(p.bias)[at];
  }
}

// One warp.
template <typename P>
__device__ __forceinline__ void fill(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK, k_full = p.k / kBlockK, lane = threadIdx.x % 32;
  const int runs = (p.n + kItemRows - 1) / kItemRows, halves = (p.n + 127) / 128;
  Cursor<P::kStages> ring;
  float bias[kItemRows / 32], row_scale = 0.f;
  Place place, next;
  bool has_next = item_of_round(0) < num_items;
  const auto look_up = [&](int round) {
    next = locate_even<kItemRows>(p.rows, item_of_round(round), runs);
    load_bias(bias, p, next, lane);
    row_scale = __ldg(p.row_scales + next.expert * halves + min(next.column / 128 + lane % 2, halves - 1));
  };
  if (has_next) look_up(0);
  for (int round = 0; has_next;) {
    place = next;
    const int boxes = (place.rows + kBoxTokens - 1) / kBoxTokens;
    const uint32_t bytes = boxes * kBoxTokens * kBlockK + kScaleBox * 4 + kCodeBytes + kOffsetBytes;
    for (int i = 0; i < k_blocks; ++i, ring.advance()) {
      const int kb = block_of(i, k_full, k_blocks);
      mbarrier_wait(at.empty + 8 * ring.stage, ring.parity ^ 1);
      __syncwarp();  // before lane 0 lets the next phase begin
      const uint32_t barrier = at.full + 8 * ring.stage, stage = at.base + ring.stage * P::kStageBytes;
      if (i == 0) {
        if (lane == 0) store_place(stage + P::kPlaceAt, place);
        if (lane < 2) store_shared(stage + P::kRowScalesAt + 4 * lane, __float_as_uint(row_scale));
#pragma unroll
        for (int j = 0; j < kItemRows / 32; ++j) {
          store_shared(stage + P::kBiasAt + 4 * (32 * j + lane), __float_as_uint(bias[j]));
        }
        __syncwarp();
      }
      if (lane == 0) {
        mbarrier_arrive_expect(barrier, bytes);
        const int row = place.expert * p.n + place.column;
        tma_load_3d(stage + P::kCodesAt, &p.codes, barrier, kb * kRowCodes, P::kGateUp ? row / 2 : row, 0);
        tma_load_2d(stage + P::kOffsetsAt, &p.offsets, barrier, 0,
                    (place.expert * runs + place.column / kItemRows) * k_blocks + kb);
#pragma unroll 1
        for (int b = 0; b < boxes; ++b) {
          tma_load_2d(stage + b * kBoxTokens * kBlockK, &p.x, barrier, kb * kBlockK, place.row + b * kBoxTokens);
        }
        tma_load_2d(stage + P::kScalesAt, &p.x_scales, barrier, place.row & ~3, kb);
      } else if constexpr (kWarpArrivals > 1) {
        mbarrier_arrive(barrier);  // tells of this lane's own stores
      }
      __syncwarp();
      if (i == min(2, k_blocks - 1)) {
        has_next = item_of_round(++round) < num_items;
        if (has_next) look_up(round);
      }
    }
  }
}

}  // namespace rose::moe::swapped
