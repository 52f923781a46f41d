// Sizes of prefill_swapped.cuh, where things lie in shared memory, and the order in which a block walks its tiles.
#pragma once

#include "prefill_tiles.cuh"

namespace rose::moe::swapped {

constexpr int kItemRows = 256;  // of the weights, in a tile
constexpr int kTokens = 128;
constexpr int kBoxTokens = 32;
constexpr int kCodeBytes = kItemRows * kBlockK / 2, kRowCodes = kBlockK / 2;
constexpr int kOffsetBytes = kItemRows * 4;
constexpr int kTables = 24;  // shifts -14 .. 9: below, every code rounds to zero; above, no code but 0 is met
constexpr int kLowestShift = -14;

struct Problem {
  // x [R, K] in the order above; codes [P, E N / P, K / 2], P = 2 (gate, up) or 1; offsets [E, N / 256, K / 128, 256] words
  CUtensorMap x, x_scales, codes, offsets;
  Rows rows;
  const float* row_scales;  // [E, ceil(N / 128)]
  const void* bias;         // [E, N]
  int bias_is_bf16;
  int n, k;
  uint8_t* hidden;
  float* hidden_scales;
  int scales_stride;
  float alpha, limit;
  __nv_bfloat16* y;
};

template <bool kGateUpP>
struct Plan {
  static constexpr bool kGateUp = kGateUpP;
  static constexpr int kStages = 3, kThreads = 384;
  static constexpr int kXBytes = kTokens * kBlockK;
  static constexpr int kCodesAt = kXBytes, kOffsetsAt = kCodesAt + kCodeBytes, kScalesAt = kOffsetsAt + kOffsetBytes;
  // Of a tile's first stage: its place, the scales of its two runs of 128 rows, its bias.
  static constexpr int kPlaceAt = kScalesAt + 640, kRowScalesAt = kPlaceAt + 16, kBiasAt = kPlaceAt + 128;
  static constexpr int kStageBytes = (kBiasAt + 4 * kItemRows + 1023) / 1024 * 1024;
  static constexpr int kStaged = kStages * kStageBytes;  // what waits to be stored: 32 KB
  static constexpr int kTable = kStaged + kTokens * kItemRows;
  static constexpr int kBarriers = kTable + 256, kPlaces = kBarriers + 128;
  static constexpr int kSharedBytes = 1024 + kPlaces + 8 * 32;
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  static_assert(2 * kStages + 2 <= 16, "more barriers than their place holds");
  // Codes in a stage: from a slab, and from h = 0 to h = 1.
  static constexpr int kSlabPitch = (kGateUp ? 32 : 64) * kRowCodes, kHalfPitch = (kGateUp ? 128 : 8) * kRowCodes;
};

struct Shared {
  uint32_t base, full, empty, staged_full, staged_empty, places;
};

// The half group of a ragged K comes first, the whole ones in order after it.
__device__ __forceinline__ int block_of(int i, int k_full, int k_blocks) {
  if (k_full == k_blocks) return i;
  return i == 0 ? k_full : i - 1;
}

}  // namespace rose::moe::swapped
