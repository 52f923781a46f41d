// The warp that fills the stages of prefill_wide.cuh.
#pragma once

#include "prefill_wide_plan.cuh"
#include "ring.cuh"

namespace rose::moe::wide {

// What a tile's end needs, as this lane of the filling warp asks for it: scales of tokens times that of the rows, all
// signs turned back, and the bias.
template <bool kGateUp>
struct End {
  float scales[kTokens / 32], bias[kItemRows / 32], row_scale;

  __device__ __forceinline__ void load(const Problem& p, const Place& place, int lane) {
#pragma unroll
    for (int i = 0; i < kTokens / 32; ++i) {
      const int token = min(32 * i + lane, place.rows - 1);
      scales[i] = kGateUp ? __ldg(p.token_scales + place.row + token) : p.hidden_unit;
    }
#pragma unroll
    for (int i = 0; i < kItemRows / 32; ++i) {
      const size_t at = size_t(place.expert) * p.n + min(place.column + 32 * i + lane, p.n - 1);
      bias[i] = p.bias_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[at])
                               : static_cast<const float*>(p.bias)[at];
    }
    row_scale = __ldg(p.row_scales + place.expert * ((p.n + kItemRows - 1) / kItemRows) + place.column / kItemRows);
  }

  __device__ __forceinline__ void store(uint32_t at, int lane) const {
#pragma unroll
    for (int i = 0; i < kTokens / 32; ++i) {
      store_shared(at + 4 * (32 * i + lane), __float_as_uint(-row_scale * scales[i]));
    }
#pragma unroll
    for (int i = 0; i < kItemRows / 32; ++i) {
      store_shared(at + 4 * (kTokens + 32 * i + lane), __float_as_uint(bias[i]));
    }
  }
};

// One warp.
template <typename P>
__device__ __forceinline__ void fill(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK, k_full = p.k / kBlockK, lane = threadIdx.x % 32;
  const int runs = (p.n + kItemRows - 1) / kItemRows;
  Cursor<P::kStages> ring;
  Cursor<2> ends;
  End<P::kGateUp> end;
  Place place, next;
  bool has_next = item_of_round(0) < num_items;
  const auto look_up = [&](int round) {
    next = locate_even<kItemRows>(p.rows, item_of_round(round), runs);
    end.load(p, next, lane);
  };
  const auto row_of = [&](const Place& of) {
    const int row = of.expert * p.n + of.column;
    return P::kGateUp ? row / 2 : row;
  };
  // Offsets lie by 256 rows and stage, those of the first 128 rows first.
  const auto offsets_of = [&](const Place& of, int kb) {
    const int run = of.column / kItemRows;
    return 2 * ((of.expert * ((runs + 1) / 2) + run / 2) * k_blocks + kb) + run % 2;
  };
  if (has_next) look_up(0);
  for (int round = 0; has_next; ends.advance()) {
    place = next;
    const int boxes = (place.rows + kBoxTokens - 1) / kBoxTokens;
    const uint32_t bytes = boxes * kBoxTokens * kBlockK + kCodeBytes + kOffsetBytes;
    for (int i = 0; i < k_blocks; ++i, ring.advance()) {
      const int kb = block_of(i, k_full, k_blocks);
      mbarrier_wait(at.empty + 8 * ring.stage, ring.parity ^ 1);
      if (i == 0) mbarrier_wait(at.end_empty + 8 * ends.stage, ends.parity ^ 1);
      __syncwarp();  // before lane 0 lets the next phase begin
      const uint32_t barrier = at.full + 8 * ring.stage, stage = at.base + ring.stage * P::kStageBytes;
      if (i == 0) {
        const uint32_t end_at = at.base + P::kEnds + ends.stage * P::kEndBytes;
        end.store(end_at, lane);
        if (lane == 0) store_place(end_at + P::kPlaceAt, place);
        __syncwarp();
      }
      if (lane == 0) {
        mbarrier_arrive_expect(barrier, bytes);
        tma_load_3d(stage + P::kCodesAt, &p.codes, barrier, kb * kRowCodes, row_of(place), 0);
        tma_load_2d(stage + P::kOffsetsAt, &p.offsets, barrier, 0, offsets_of(place, kb));
#pragma unroll 1
        for (int b = 0; b < boxes; ++b) {
          tma_load_2d(stage + b * kBoxTokens * kBlockK, &p.x, barrier, kb * kBlockK, place.row + b * kBoxTokens);
        }
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

}  // namespace rose::moe::wide
