// Sizes of prefill_fused.cuh, where things lie in shared memory, and the order in which a block walks its tiles.
#pragma once

#include "prefill_tiles.cuh"

namespace rose::moe::fused {

constexpr int kColumns = 128;  // of one accumulator, of one scale of W and of one block of codes
constexpr int kSlab = 64;
constexpr int kSlabBytes = kSlab * kBlockK;
constexpr int kPackedBytes = kColumns * kBlockK / 2;
constexpr int kPackedStages = 3, kPackedPitch = kPackedBytes + 128;
constexpr int kLutEntries = 50;  // shifts -40 .. 9, as in expand_mxfp4
constexpr int kScalePitch = 640;  // a box of kScaleBox scales, to the next 128 bytes

struct Problem {
  CUtensorMap a, a_scales, w;  // w: E4M3 [E, N, K], or codes [E, N, K / 2]
  Rows rows;
  const float* w_scales;          // [E, ceil(N / 128), ceil(K / 128)]
  const uint8_t* exponents;       // MXFP4: [E, N, K / 32]
  const int* tile_exponents;      // MXFP4: as w_scales
  const void* bias;               // [E, N]
  int bias_is_bf16;
  int n, k;
  uint8_t* hidden;
  float* hidden_scales;
  int scales_stride;
  float alpha, limit;
  __nv_bfloat16* y;
};

// kSlabs x kRuns accumulators a consumer: 2 x 1 or 1 x 2.
template <bool kGateUpP, bool kMxfp4P, int kSlabsP, int kStagesP>
struct Plan {
  static constexpr bool kGateUp = kGateUpP, kMxfp4 = kMxfp4P;
  static constexpr int kSlabs = kSlabsP, kRuns = 2 / kSlabs, kStages = kStagesP;
  static constexpr int kRows = 128 * kSlabs, kWide = kColumns * kRuns;
  static constexpr int kPasses = kGateUp && kRuns == 1 ? 2 : 1;
  static constexpr int kItemColumns = kWide * kPasses;
  static constexpr int kThreads = kMxfp4 ? 512 : 384;
  static constexpr int kABytes = kRows * kBlockK, kWBytes = kWide * kBlockK;
  static constexpr int kStageBytes = kABytes + kWBytes;
  // Beside a stage: scales of A, a box per 128 rows; the place, and behind it the scales of W; the bias.
  static constexpr int kPlaceAt = kSlabs * kScalePitch, kWScalesAt = kPlaceAt + 16, kBiasAt = kPlaceAt + 128;
  static constexpr int kAsideBytes = kBiasAt + 4 * kWide;
  static constexpr int kAside = kStages * kStageBytes;
  static constexpr int kPacked = kAside + kStages * kAsideBytes;
  static constexpr int kLut = kPacked + (kMxfp4 ? kPackedStages * kPackedPitch : 0);
  static constexpr int kParked = kLut + (kMxfp4 ? 512 : 0);
  // Barriers (at most 20), then the place of each multiplying warp's tile.
  static constexpr int kBarriers = kParked + (kPasses == 2 ? 32 * 256 * 4 : 0), kPlaces = kBarriers + 256;
  static constexpr int kSharedBytes = 1024 + kPlaces + 128;
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  static_assert(kSlabs == 1 || kSlabs == 2, "one or two slabs a consumer");
  static_assert(!kMxfp4 || kSlabs == 2, "expansion hides only under tiles of 256 rows");
};

// Addresses of everything in shared memory.
struct Shared {
  uint32_t base, full, empty, packed_full, packed_empty, places;
};

// Order: expert by expert; a band of row tiles inside one run of columns, then the next run.
template <typename P>
__device__ __forceinline__ Place locate(const Rows& rows, int item, int runs) {
  constexpr int kBand = kBandTiles * kTileRows / P::kRows;
  Place found;
  found.expert = __ldg(rows.expert + item / runs);
  const int first = __ldg(rows.tiles + found.expert);
  const int tiles = __ldg(rows.tiles + found.expert + 1) - first;
  const int begin = __ldg(rows.starts + found.expert), end = __ldg(rows.starts + found.expert + 1);
  int local = item - first * runs;
  const int band = local / (kBand * runs);
  const int band_tiles = min(tiles - band * kBand, kBand);
  local -= band * kBand * runs;
  const int run = local / band_tiles;
  found.row = begin + (band * kBand + local - run * band_tiles) * P::kRows;
  found.rows = min(end - found.row, P::kRows);
  found.column = run * P::kItemColumns;
  return found;
}

// Walk this block's tiles: `place` is the current one, `next` is looked up while it is worked on.
template <typename P>
struct Walk {
  int round = 0, runs, num_items, pass = 0;
  bool has_next;
  Place place, next;

  __device__ __forceinline__ Walk(const Problem& p, int num_items_) : num_items(num_items_) {
    runs = (p.n + P::kItemColumns - 1) / P::kItemColumns;
    has_next = item_of_round(0) < num_items;
    if (has_next) next = locate<P>(p.rows, item_of_round(0), runs);
  }
  __device__ __forceinline__ bool advance() {
    place = next;
    return has_next;
  }
  __device__ __forceinline__ void look_ahead(const Problem& p) {
    if (P::kPasses == 2 && pass == 0 && place.column + kColumns < p.n) {
      pass = 1;
      next = place;
      next.column += kColumns;
      return;
    }
    pass = 0;
    ++round;
    has_next = item_of_round(round) < num_items;
    if (has_next) next = locate<P>(p.rows, item_of_round(round), runs);
  }
};

}  // namespace rose::moe::fused
