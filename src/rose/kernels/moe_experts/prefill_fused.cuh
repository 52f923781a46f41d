// Grouped FP8 product for Hopper: weights may be MXFP4, expanded to E4M3 on their way to the tensor
// core; tiles of 256 rows; what a tile needs besides its operands travels with its first stage.
//
// Roles of a persistent block: two warpgroups multiply; with MXFP4 the four warps of a third expand weights; of the
// last, warp 0 fills the ring of stages by TMA and warp 1 the ring of packed weights.
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

#include <cuda_fp16.h>

#include "prefill_permute.cuh"
#include "prefill_ptx.cuh"
#include "prefill_tiles.cuh"
#include "ring.cuh"
#include "warp.cuh"

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

struct Place {
  int expert, row, rows, column;  // first row and number of rows; first column
};

// Addresses of everything in shared memory.
struct Shared {
  uint32_t base, full, empty, packed_full, packed_empty, places;
};

__device__ __forceinline__ void store_place(uint32_t at, const Place& place) {
  store_shared(at, {uint32_t(place.expert), uint32_t(place.row), uint32_t(place.rows), uint32_t(place.column)});
}

__device__ __forceinline__ Place load_place(uint32_t at) {
  uint32_t words[4];
  load_shared(words, at);
  return {int(words[0]), int(words[1]), int(words[2]), int(words[3])};
}

// The item a block takes in a round. Rounds are rotated: the long and short tiles of an expert alternate, and a grid
// of even size would give one block long ones only.
__device__ __forceinline__ int item_of_round(int round) {
  const int grid = int(gridDim.x);
  return round * grid + int((blockIdx.x + 37u * unsigned(round)) % unsigned(grid));
}

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

// alpha2 = -alpha log2(e). Both approximations are within 2 units in the last place; E4M3 keeps four bits.
__device__ __forceinline__ float fast_swiglu(float gate, float up, float alpha2, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return gate * fast_reciprocal(1.f + fast_exp2(alpha2 * gate)) * (up + 1.f);
}

// SwiGLU of a piece, in place: channels of half h are total[4j + 2h].
__device__ __forceinline__ void activate(float (&total)[64], const Problem& p) {
  const float alpha2 = -1.4426950408889634f * p.alpha;
#pragma unroll
  for (int i = 0; i < 64; i += 2) total[i] = fast_swiglu(total[i], total[i + 1], alpha2, p.limit);
}

__device__ __forceinline__ float half_of(uint32_t packed, int half) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&packed));
  return half ? both.y : both.x;
}

// Row of a tile that a thread's first sums belong to.
__device__ __forceinline__ int row_of(int thread) {
  return thread / 128 * kSlab + thread % 128 / 32 * 16 + thread % 32 / 4;
}

// One row of a group of up to 128 channels: `first` and `second` are 64 each; `row` of all rows.
__device__ __forceinline__ void store_group(const float (&first)[16], const float (&second)[16], bool has_second,
                                            bool is_in, const Problem& p, size_t row, int channel, int q) {
  float amax = 0.f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    amax = fmaxf(amax, fabsf(first[j]));
    if (has_second) amax = fmaxf(amax, fabsf(second[j]));
  }
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
  const float scale = fmaxf(amax, 1e-4f) * (1.f / 448.f);
  const float inverse = fast_reciprocal(scale);
  if (is_in && q == 0) p.hidden_scales[size_t(channel / 128) * p.scales_stride + row] = scale;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (s == 1 && !has_second) break;
    uint32_t words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float* d = (s ? second : first) + 4 * t;
      words[t] = pack_e4m3(d[0] * inverse, d[1] * inverse, d[2] * inverse, d[3] * inverse);
    }
    transpose_quad(words, q);
    if (is_in) {
      *reinterpret_cast<uint4*>(p.hidden + row * (p.n / 2) + channel + 64 * s + 16 * q) = transpose_bytes(words);
    }
  }
}

template <typename P>
__device__ __forceinline__ void store_hidden(float (&total)[2][64], const Problem& p, const Place& place, int thread,
                                             int pieces, uint32_t parked, bool is_second) {
  const int row = row_of(thread), q = thread % 4;
  if constexpr (P::kRuns == 2) {
#pragma unroll
    for (int s = 0; s < 2; ++s) activate(total[s], p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float first[16], second[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        first[j] = total[0][4 * j + 2 * half];
        second[j] = total[1][4 * j + 2 * half];
      }
      store_group(first, second, pieces == 2, row + 8 * half < place.rows, p, size_t(place.row) + row + 8 * half,
                  place.column / 2, q);
    }
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (s >= pieces) break;
      activate(total[s], p);
      const uint32_t words = parked + 4 * (s * 16 * 256 + thread);
      if (!is_second && place.column + kColumns < p.n) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          store_shared(words + 4 * 256 * j, pack_half(total[s][4 * j], total[s][4 * j + 2]));
        }
        continue;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float kept[16], fresh[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          fresh[j] = total[s][4 * j + 2 * half];
          kept[j] = is_second ? half_of(__float_as_uint(load_shared(words + 4 * 256 * j)), half) : fresh[j];
        }
        const int local = row + 2 * kSlab * s + 8 * half;
        store_group(kept, fresh, is_second, local < place.rows, p, size_t(place.row) + local,
                    (place.column - (is_second ? kColumns : 0)) / 2, q);
      }
    }
  }
}

template <typename P>
__device__ __forceinline__ void store_rows(const float (&total)[2][64], const Problem& p, const Place& place,
                                           int thread, int pieces) {
  const int row = row_of(thread), q = thread % 4;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (s >= pieces) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = row + (P::kSlabs == 2 ? 2 * kSlab * s : 0) + 8 * half;
      const bool is_in = local < place.rows;
      __nv_bfloat16* out = p.y + (size_t(place.row) + local) * p.n;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* d = &total[s][4 * (4 * t + i) + 2 * half];
          words[i] = pack_bf16(d[0], d[1]);
        }
        transpose_quad(words, q);
        const int column = place.column + (P::kRuns == 2 ? kColumns * s : 0) + 32 * t + 8 * q;
        if (is_in && column < p.n) {
          *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
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
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t items = int64_t(max_tiles) * ((p.n + P::kItemColumns - 1) / P::kItemColumns);
  product<P><<<unsigned(items < processors ? items : processors), P::kThreads, P::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace rose::moe::fused
