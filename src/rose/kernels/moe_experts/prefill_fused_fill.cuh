// Who fills the stages of prefill_fused.cuh: a warp by TMA; with MXFP4 another one, and four that expand what it brings.
#pragma once

#include "prefill_fused_plan.cuh"
#include "prefill_permute.cuh"
#include "ring.cuh"
#include "warp.cuh"

namespace rose::moe::fused {

// Bias of 32 lanes' columns, as bits.
template <typename P>
__device__ __forceinline__ void load_bias(float (&bias)[P::kWide / 32], const Problem& p, const Place& place,
                                          int lane) {
#pragma unroll
  for (int i = 0; i < P::kWide / 32; ++i) {
    const size_t at = size_t(place.expert) * p.n + min(place.column + 32 * i + lane, p.n - 1);
    bias[i] = p.bias_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[at])
                             : static_cast<const float*>(p.bias)[at];
  }
}

// Warp 0 of the last warpgroup. Lane r < kRuns asks for the scale of W of run r a stage ahead.
template <typename P>
__device__ __forceinline__ void fill_stages(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK, lane = threadIdx.x % 32;
  const int column_blocks = (p.n + kColumns - 1) / kColumns;
  Cursor<P::kStages> ring;
  Walk<P> walk(p, num_items);
  float bias[P::kWide / 32];
  if (walk.has_next) load_bias<P>(bias, p, walk.next, lane);
  while (walk.advance()) {
    const Place place = walk.place;
    const int slabs = (place.rows + kSlab - 1) / kSlab, boxes = (slabs + 1) / 2;
    const uint32_t bytes =
        slabs * kSlabBytes + boxes * kScaleBox * 4 + (P::kMxfp4 ? 0 : P::kWBytes);
    const int column_block = min(place.column / kColumns + lane % P::kRuns, column_blocks - 1);
    const float* w_scales = p.w_scales + (size_t(place.expert) * column_blocks + column_block) * k_blocks;
    float w_scale = __ldg(w_scales);
    for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
      mbarrier_wait(at.empty + 8 * ring.stage, ring.parity ^ 1);
      __syncwarp();  // before lane 0 lets the next phase begin
      const uint32_t barrier = at.full + 8 * ring.stage;
      const uint32_t a = at.base + ring.stage * P::kStageBytes;
      const uint32_t aside = at.base + P::kAside + ring.stage * P::kAsideBytes;
      if (lane < P::kRuns) store_shared(aside + P::kWScalesAt + 4 * lane, __float_as_uint(w_scale));
      w_scale = __ldg(w_scales + min(kb + 1, k_blocks - 1));
      if (kb == 0) {
        if (lane == 0) store_place(aside + P::kPlaceAt, place);
#pragma unroll
        for (int i = 0; i < P::kWide / 32; ++i) {
          store_shared(aside + P::kBiasAt + 4 * (32 * i + lane), __float_as_uint(bias[i]));
        }
      }
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive_expect(barrier, bytes);
#pragma unroll 1
        for (int h = 0; h < slabs; ++h) {
          tma_load_2d(a + h * kSlabBytes, &p.a, barrier, kb * kBlockK, place.row + h * kSlab);
        }
#pragma unroll 1
        for (int b = 0; b < boxes; ++b) {
          tma_load_2d(aside + b * kScalePitch, &p.a_scales, barrier, (place.row & ~3) + b * 2 * kSlab, kb);
        }
        if constexpr (!P::kMxfp4) {
          tma_load_3d(a + P::kABytes, &p.w, barrier, kb * kBlockK, place.column, place.expert);
        }
      } else if constexpr (kWarpArrivals > 1) {
        mbarrier_arrive(barrier);  // tells of this lane's own stores
      }
      __syncwarp();
      if (kb == min(2, k_blocks - 1)) {
        walk.look_ahead(p);
        if (walk.has_next) load_bias<P>(bias, p, walk.next, lane);
      }
    }
  }
}

// Warp 1 of the last warpgroup: codes by TMA; the exponents of the next tile are asked into L2.
template <typename P>
__device__ __forceinline__ void fill_packed(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK, lane = threadIdx.x % 32;
  const int row_bytes = p.k / 32;
  Cursor<kPackedStages> ring;
  Walk<P> walk(p, num_items);
  while (walk.advance()) {
    const Place place = walk.place;
    for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
      mbarrier_wait(at.packed_empty + 8 * ring.stage, ring.parity ^ 1);
      __syncwarp();  // before lane 0 lets the next phase begin
      const uint32_t barrier = at.packed_full + 8 * ring.stage;
      const uint32_t packed = at.base + P::kPacked + ring.stage * kPackedPitch;
      if (lane == 0) {
        if (kb == 0) store_place(packed + kPackedBytes, place);
        mbarrier_arrive_expect(barrier, kPackedBytes);
        tma_load_3d(packed, &p.w, barrier, kb * kBlockK / 2, place.column, place.expert);
      }
      __syncwarp();
      if (kb == min(2, k_blocks - 1)) {
        walk.look_ahead(p);
        if (walk.has_next) {
          const uint8_t* exponents = p.exponents + (size_t(walk.next.expert) * p.n + walk.next.column) * row_bytes;
          const int count = min(kColumns, p.n - walk.next.column) * row_bytes;
#pragma unroll 1
          for (int byte = 128 * lane; byte < count; byte += 4096) {
            prefetch_l2(exponents + byte);
          }
        }
      }
    }
  }
}

// Eight codes of a word: the magnitudes looked up by byte permutation, the signs replicated (permute_bytes says why).
__device__ __forceinline__ void expand_word(uint32_t word, uint32_t low, uint32_t high, uint32_t& first,
                                            uint32_t& second) {
  const uint32_t magnitudes = word & 0x77777777u;
  const uint32_t signs0 = permute_bytes(0x80808080u, 0x80808080u, word & 0xffffu) << 1;
  const uint32_t signs1 = permute_bytes(0x80808080u, 0x80808080u, word >> 16) << 1;
  first = permute_bytes(low, high, magnitudes & 0xffffu) | (signs0 & 0x80808080u);
  second = permute_bytes(low, high, magnitudes >> 16) | (signs1 & 0x80808080u);
}

// Four warps. Lane l of warp w takes block l % 4 (32 codes along K) of rows 32w + 8i + l / 4, i = 0..3: reads of codes
// are consecutive, and eight lanes write eight different chunks of 16 bytes.
template <typename P>
__device__ __forceinline__ void expand(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK, row_bytes = p.k / 32;
  const int column_blocks = (p.n + kColumns - 1) / kColumns;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, block = lane % 4;
  const int row = 32 * warp + lane / 4;
  const uint32_t chunk0 = ((2 * block) ^ (lane / 4)) * 16, chunk1 = chunk0 ^ 16;
  Cursor<kPackedStages> packed_ring;
  Cursor<P::kStages> ring;
  for (int round = 0; item_of_round(round) < num_items; ++round) {
    for (int pass = 0; pass < P::kPasses; ++pass) {
      const uint8_t* exponents = nullptr;  // of this lane's block in row i = 0
      const int* tile_exponent = nullptr;
      int exponent[4], tile = 0, rows_left = 0;
      bool is_last_pass = false;
      for (int kb = 0; kb < k_blocks; ++kb, packed_ring.advance(), ring.advance()) {
        mbarrier_wait(at.packed_full + 8 * packed_ring.stage, packed_ring.parity);
        const uint32_t packed = at.base + P::kPacked + packed_ring.stage * kPackedPitch;
        if (kb == 0) {
          const Place place = load_place(packed + kPackedBytes);
          is_last_pass = place.column + kColumns >= p.n;
          tile_exponent = p.tile_exponents +
                          (size_t(place.expert) * column_blocks + place.column / kColumns) * k_blocks;
          tile = __ldg(tile_exponent);
          // Rows past N and blocks past K have zeros for codes, whatever exponent is read for them.
          const int first = min(place.column + row, p.n - 1);
          rows_left = p.n - 1 - first;
          exponents = p.exponents + (size_t(place.expert) * p.n + first) * row_bytes;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            exponent[i] = __ldg(exponents + min(8 * i, rows_left) * row_bytes + min(block, row_bytes - 1));
          }
        }
        uint32_t lut[4];  // expand_mxfp4 explains the bounds
#pragma unroll
        for (int i = 0; i < 4; ++i) lut[i] = at.base + P::kLut + 8 * (max(min(exponent[i] - tile, 9), -40) + 40);
        const int next = min(kb + 1, k_blocks - 1);
        tile = __ldg(tile_exponent + next);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          exponent[i] = __ldg(exponents + min(8 * i, rows_left) * row_bytes + min(4 * next + block, row_bytes - 1));
        }
        mbarrier_wait(at.empty + 8 * ring.stage, ring.parity ^ 1);
        const uint32_t codes_at = packed + row * (kBlockK / 2) + block * 16;
        const uint32_t w = at.base + ring.stage * P::kStageBytes + P::kABytes + row * kBlockK;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t codes[4], table[2], out[8];
          load_shared(codes, codes_at + i * 8 * (kBlockK / 2));
          load_shared(table, lut[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) expand_word(codes[j], table[0], table[1], out[2 * j], out[2 * j + 1]);
          store_shared(w + i * 8 * kBlockK + chunk0, {out[0], out[1], out[2], out[3]});
          store_shared(w + i * 8 * kBlockK + chunk1, {out[4], out[5], out[6], out[7]});
        }
        fence_proxy_async();
        __syncwarp();
        if (is_arriving()) {
          mbarrier_arrive(at.packed_empty + 8 * packed_ring.stage);
          mbarrier_arrive(at.full + 8 * ring.stage);
        }
      }
      if (P::kPasses == 2 && is_last_pass) break;
    }
  }
}

}  // namespace rose::moe::fused
