// Sizes of prefill_wide.cuh, where things lie in shared memory, and which tile is whose.
#pragma once

#include "prefill_swapped_plan.cuh"

namespace rose::moe::wide {

using swapped::block_of;
using swapped::kBoxTokens;
using swapped::kRowCodes;

constexpr int kItemRows = 128, kTokens = 256;
constexpr int kCodeBytes = kItemRows * kRowCodes, kOffsetBytes = kItemRows * 4;

struct Problem {
  // x [R, K] in the order of prefill_swapped.cuh; codes [P, E N / P, K / 2], P = 2 (gate, up) or 1; offsets
  // [E, ceil(N / 256), ceil(K / 128), 256] words (swapped_tables.py), of which a tile reads one half
  CUtensorMap x, codes, offsets;
  Rows rows;
  const float* token_scales;  // [R], of gate-up
  const float* row_scales;    // [E, ceil(N / 128)]
  const void* bias;           // [E, N]
  int bias_is_bf16;
  int n, k;
  float hidden_unit;  // what the SwiGLU's E4M3 numbers count in: gate-up writes them, down reads them
  float alpha, limit;
  uint8_t* hidden;   // of gate-up
  __nv_bfloat16* y;  // of down
};

template <bool kGateUpP>
struct Plan {
  static constexpr bool kGateUp = kGateUpP;
  static constexpr int kStages = 4, kThreads = 384;
  static constexpr int kCodesAt = kTokens * kBlockK, kOffsetsAt = kCodesAt + kCodeBytes;
  static constexpr int kStageBytes = (kOffsetsAt + kOffsetBytes + 1023) / 1024 * 1024;
  // What waits to be stored: 16 KB of a consumer. Then a tile's place and what its end needs, for this tile and the next.
  static constexpr int kStaged = kStages * kStageBytes, kStagedBytes = 128 * 128;
  static constexpr int kEnds = kStaged + 2 * kStagedBytes;
  static constexpr int kBiasAt = 4 * kTokens, kPlaceAt = kBiasAt + 4 * kItemRows, kEndBytes = kPlaceAt + 16;
  static constexpr int kTable = kEnds + 2 * kEndBytes;
  static constexpr int kBarriers = kTable + 256;
  static constexpr int kSharedBytes = 1024 + kBarriers + 128;
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  static_assert(2 * kStages + 2 <= 16, "more barriers than their place holds");
  // From h = 0 to h = 1 in the codes of a stage.
  static constexpr int kHalfPitch = (kGateUp ? 64 : 8) * kRowCodes;
};

struct Shared {
  uint32_t base, full, empty, end_empty;
};

// The row of a tile that a thread's first codes (h = 0) are of.
template <typename P>
__device__ __forceinline__ int code_row(int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, g = thread % 32 / 4;
  return P::kGateUp ? 8 * (4 * (warp / 2) + 2 * consumer + warp % 2) + g : 64 * consumer + 16 * warp + g;
}

}  // namespace rose::moe::wide
