// Grouped product of MXFP4 weights and E4M3 activations for Hopper, operands swapped: weights are operand A, expanded
// into registers by the warps that multiply them; tokens are operand B.
//
// A tile is 256 rows of an expert's matrix and up to 128 of its tokens. Roles of a persistent block: two warpgroups
// multiply 128 rows each, as two slabs of 64; one warp of a third fills the ring of stages by TMA.
//   pieces   a tile's tokens are two pieces of kN = 64, 48 or 32, chosen by the tile, so that it costs what it has.
//            Sums of one piece, both slabs, are live beside the float32 totals: a token's scale serves both slabs.
//   scales   one power of two for 128 rows and all of K (swapped_tables.py): totals are kept in its units, so that a
//            partial sum meets the token's scale only.
//   codes    thread (g, t) of a warp takes 32 codes of a row as they lie, block t of 128 columns. Word v of the four
//            becomes its bytes of product v of the four; activations are stored in that order:
//            byte 32v + 16u + 4t + b of a group of 128 is column 32t + 8v + 4u + b. The half group of a ragged K has
//            blocks of 16 codes and products v of two: byte 32v + 16u + 4t + b is column 16t + 8v + 4u + b.
//   rows     gate and up of a channel lie in one thread: fragment row 8h + g of warp w in slab s is channel
//            32s + 8w + g of the consumer's 64, h = 0 gate, h = 1 up. Down: row 64s + 16w + 8h + g.
// Expansion of a slab's next codes runs beside the products of the other slab.
// Why not slabs in turns, products always on their way: measured, 5 to 9 % slower (docs/performance.md). Why not three
// consumers of 64 rows: 192 rows are 96 channels, another group of the SwiGLU's scales than the 128 of every other format
// here, and 4/3 as many loads of scales and tokens for a product.
#pragma once

#include "prefill_fused.cuh"
#include "prefill_swapped_ptx.cuh"
#include "wgmma_fp8_registers.cuh"

namespace rose::moe::swapped {

using fused::item_of_round;
using fused::load_place;
using fused::Place;
using fused::store_place;

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

// Order as in prefill_fused.cuh: expert by expert; a band of tiles inside one run of rows, then the next run. An expert's
// tokens are shared out evenly over its tiles: a short tile would pay for a whole expansion.
template <typename P>
__device__ __forceinline__ Place locate(const Rows& rows, int item, int runs) {
  Place found;
  found.expert = __ldg(rows.expert + item / runs);
  const int first = __ldg(rows.tiles + found.expert);
  const int tiles = __ldg(rows.tiles + found.expert + 1) - first;
  const int begin = __ldg(rows.starts + found.expert), end = __ldg(rows.starts + found.expert + 1);
  int local = item - first * runs;
  const int band = local / (kBandTiles * runs);
  const int band_tiles = min(tiles - band * kBandTiles, kBandTiles);
  local -= band * kBandTiles * runs;
  const int run = local / band_tiles;
  const int tile = band * kBandTiles + local - run * band_tiles;
  const int each = ((end - begin + tiles - 1) / tiles + 7) & ~7;
  found.row = begin + tile * each;
  found.rows = min(end - found.row, each);
  found.column = run * kItemRows;
  return found;
}

// The half group of a ragged K comes first, the whole ones in order after it.
__device__ __forceinline__ int block_of(int i, int k_full, int k_blocks) {
  if (k_full == k_blocks) return i;
  return i == 0 ? k_full : i - 1;
}

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
    next = locate<P>(p.rows, item_of_round(round), runs);
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

// Eight codes to two words of E4M3, all signs turned: a positive code has bit 7, a negative one has not (`promote`
// subtracts). A selector with its top bit set gives the sign of 0x40, nothing, and else 0x40 itself.
__device__ __forceinline__ void expand_word(uint32_t codes, const uint32_t (&table)[2], uint32_t& first,
                                            uint32_t& second) {
  const uint32_t magnitudes = codes & 0x77777777u;
  first = permute_bytes(table[0], table[1], magnitudes) + 2 * permute_bytes(0x40404040u, 0x40404040u, codes);
  second = permute_bytes(table[0], table[1], magnitudes >> 16) + 2 * permute_bytes(0x40404040u, 0x40404040u, codes >> 16);
}

// A slab's operand of one stage: kSteps products of 32 along K.
template <typename P, int kSteps>
__device__ __forceinline__ void expand(uint32_t (&a)[4][4], int slab, uint32_t codes_at, uint32_t offsets,
                                       uint32_t table_at) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t table[2], codes[kSteps];
    load_shared(table, table_at + (offsets >> (16 * slab + 8 * h) & 255));
    load_shared(codes, codes_at + slab * P::kSlabPitch + h * P::kHalfPitch);
#pragma unroll
    for (int v = 0; v < kSteps; ++v) expand_word(codes[v], table, a[v][h], a[v][h + 2]);
  }
}

template <int kN, int kSteps>
__device__ __forceinline__ void multiply(float (&part)[kN / 2], const uint32_t (&a)[4][4], uint64_t x) {
#pragma unroll
  for (int v = 0; v < kSteps; ++v) wgmma_e4m3<kN>(part, a[v], advance(x, 32 * v), v > 0);
}

// `scales`: of this thread's first two tokens of the piece. Returns a word that has not arrived before all of them.
template <int kN>
__device__ __forceinline__ uint32_t promote(float (&low)[kN / 2], float (&high)[kN / 2], const float (&part)[2][kN / 2],
                                            uint32_t scales) {
  uint32_t read = 0;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const float scale0 = load_shared(scales + 32 * j), scale1 = load_shared(scales + 32 * j + 4);
    read = mix(read, __float_as_uint(scale0), __float_as_uint(scale1));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int d = 4 * j + 2 * h;
      low[d] -= part[0][d] * scale0;
      low[d + 1] -= part[0][d + 1] * scale1;
      high[d] -= part[1][d] * scale0;
      high[d + 1] -= part[1][d + 1] * scale1;
    }
  }
  return read;
}

// Where a thread finds its things in every stage.
struct Mine {
  uint32_t codes, offsets, scales;
};

// One stage, whose operands are in `a`; expands those of the next, which has four products.
template <typename P, int kN, int kSteps>
__device__ __forceinline__ void multiply_stage(float (&total)[2][2][kN / 2], uint32_t (&a)[2][4][4], const Shared& at,
                                               Cursor<P::kStages>& ring, const Mine& mine, bool has_next) {
  float part[2][kN / 2];
  const uint32_t stage = at.base + ring.stage * P::kStageBytes, empty = at.empty + 8 * ring.stage;
  const uint64_t x = descriptor_swizzle128(uniform(stage));
  const uint32_t scales = stage + P::kScalesAt + mine.scales, table = at.base + P::kTable;
  wgmma_fence();
  multiply<kN, kSteps>(part[0], a[0], x);
  multiply<kN, kSteps>(part[1], a[1], x);
  wgmma_commit();
  wgmma_wait<0>();
  settle(part[0]);
  settle(part[1]);
  promote<kN>(total[0][0], total[1][0], part, scales);
  wgmma_fence();
  multiply<kN, kSteps>(part[0], a[0], advance(x, kN * kBlockK));
  wgmma_commit();
  multiply<kN, kSteps>(part[1], a[1], advance(x, kN * kBlockK));
  wgmma_commit();
  ring.advance();
  const uint32_t next = at.base + ring.stage * P::kStageBytes;
  uint32_t offsets = 0;
  if (has_next) {
    mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
    offsets = __float_as_uint(load_shared(next + P::kOffsetsAt + mine.offsets));
    wgmma_wait<1>();
    settle(part[0]);
    expand<P, 4>(a[0], 0, next + P::kCodesAt + mine.codes, offsets, table);
  }
  wgmma_wait<0>();
  settle(part[0]);
  settle(part[1]);
  const uint32_t read = promote<kN>(total[0][1], total[1][1], part, scales + 4 * kN);
  __syncwarp();
  if (is_arriving()) mbarrier_arrive_after(empty, read);
  if (has_next) expand<P, 4>(a[1], 1, next + P::kCodesAt + mine.codes, offsets, table);
}

// Of 128 rows: weight row, in the order of the matrix, of fragment row 8h + g of a warp.
template <typename P>
__device__ __forceinline__ int row_of(int thread, int slab, int h) {
  const int warp = thread % 128 / 32, g = thread % 32 / 4;
  return P::kGateUp ? 2 * (32 * slab + 8 * warp + g) + h : 64 * slab + 16 * warp + 8 * h + g;
}

// 128 rows of a tile by one consumer, from the first stage to the last; totals are in units of the row scale.
template <typename P, int kN>
__device__ __forceinline__ void multiply_tile(float (&total)[2][2][kN / 2], const Problem& p, const Shared& at,
                                              Cursor<P::kStages>& ring, const Place& place) {
  const int thread = threadIdx.x, consumer = thread / 128, warp = thread % 128 / 32, g = thread % 32 / 4, t = thread % 4;
  const uint32_t stage = at.base + ring.stage * P::kStageBytes, table = at.base + P::kTable;
  const float row_scale = load_shared(stage + P::kRowScalesAt + 4 * consumer);
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(row_scale));  // of a power of two
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float bias = load_shared(stage + P::kBiasAt + 4 * (128 * consumer + row_of<P>(thread, s, h))) * inverse;
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        total[s][0][4 * j + 2 * h] = total[s][0][4 * j + 2 * h + 1] = bias;
        total[s][1][4 * j + 2 * h] = total[s][1][4 * j + 2 * h + 1] = bias;
      }
    }
  }
  const int code_row = (P::kGateUp ? 64 : 128) * consumer + (P::kGateUp ? 8 : 16) * warp + g;
  const Mine mine = {uint32_t(code_row * kRowCodes + 16 * t), uint32_t(4 * thread),
                     uint32_t(4 * ((place.row & 3) + 2 * t))};
  const int k_full = p.k / kBlockK;
  const uint32_t offsets = __float_as_uint(load_shared(stage + P::kOffsetsAt + mine.offsets));
  uint32_t a[2][4][4];
  if (p.k % kBlockK != 0) {
    const uint32_t codes = stage + P::kCodesAt + mine.codes - 8 * t;
    expand<P, 2>(a[0], 0, codes, offsets, table);
    expand<P, 2>(a[1], 1, codes, offsets, table);
    multiply_stage<P, kN, 2>(total, a, at, ring, mine, k_full > 0);
  } else {
    expand<P, 4>(a[0], 0, stage + P::kCodesAt + mine.codes, offsets, table);
    expand<P, 4>(a[1], 1, stage + P::kCodesAt + mine.codes, offsets, table);
  }
  for (int left = k_full; left > 0; --left) multiply_stage<P, kN, 4>(total, a, at, ring, mine, left > 1);
}

// SwiGLU of 64 channels, as fp16 in the staged tile [token][channel]; chunks of 16 bytes are swapped by token.
template <typename P, int kN>
__device__ __forceinline__ void stage_hidden(const float (&total)[2][2][kN / 2], const Problem& p, float row_scale,
                                             uint32_t staged, int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const float alpha2 = -1.4426950408889634f * p.alpha;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int chunk = (8 * consumer + 4 * s + warp) ^ (lane % 8);
#pragma unroll
    for (int m = 0; m < kN / 4; m += 4) {  // matrix m: tokens 8m .. 8m + 7
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int piece = (m + i) / (kN / 8), j = (m + i) % (kN / 8);
        const float* d = &total[s][piece][4 * j];
        words[i] = pack_half(fused::fast_swiglu(d[0] * row_scale, d[2] * row_scale, alpha2, p.limit),
                             fused::fast_swiglu(d[1] * row_scale, d[3] * row_scale, alpha2, p.limit));
      }
      store_transposed(staged + (8 * m + lane) * kItemRows + 16 * chunk, words);
    }
  }
}

// A staged tile to E4M3 with a scale per token, in the order in which down reads it. One warpgroup, eight lanes a token.
template <typename P>
__device__ __forceinline__ void quantize_staged(const Problem& p, const Place& place, uint32_t staged, int thread) {
  const int warp = thread % 128 / 32, lane = thread % 32, part = lane % 8;
  const int channel = place.column / 2, block = p.n - place.column < kItemRows ? 16 : 32;  // channels of a lane's word t
  const bool is_part = part < block / 4;
  // Four tokens a round, eight in two; tokens 4 apart lie in other banks.
  for (int round = 0; 32 * (round / 2) + 8 * warp < place.rows; ++round) {
    const int token = 32 * (round / 2) + 8 * warp + 2 * (round % 2) + lane / 16 + 4 * (lane / 8 % 2);
    float v[16], amax = 0.f;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int first = block * t + 4 * part;
      uint32_t pair[2] = {0, 0};
      if (is_part) {
        load_shared(pair, staged + token * kItemRows + 16 * ((first / 8) ^ (token % 8)) + 2 * (first % 8));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[4 * t + i] = fused::half_of(pair[i / 2], i % 2);
        amax = fmaxf(amax, fabsf(v[4 * t + i]));
      }
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    const float scale = fmaxf(amax, 1e-4f) * (1.f / 448.f), inverse = fast_reciprocal(scale);
    uint32_t words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float* d = v + 4 * t;
      words[t] = pack_e4m3(d[0] * inverse, d[1] * inverse, d[2] * inverse, d[3] * inverse);
    }
    if (token < place.rows) {
      const size_t row = size_t(place.row) + token;
      if (part == 0) p.hidden_scales[size_t(channel / 128) * p.scales_stride + row] = scale;
      if (is_part) {
        *reinterpret_cast<uint4*>(p.hidden + row * (p.n / 2) + channel + 16 * part) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Output rows of one consumer: each slab through its half of the staged tile, so that whole lines are written.
template <typename P, int kN>
__device__ __forceinline__ void store_rows(const float (&total)[2][2][kN / 2], const Problem& p, const Place& place,
                                           float row_scale, uint32_t staged, int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const uint32_t mine = staged + consumer * kTokens * 128;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int column = place.column + 128 * consumer + 64 * s;
    if (column >= p.n) break;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int chunk = (2 * warp + h) ^ (lane % 8);
#pragma unroll
      for (int m = 0; m < kN / 4; m += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* d = &total[s][(m + i) / (kN / 8)][4 * ((m + i) % (kN / 8)) + 2 * h];
          words[i] = pack_bf16(d[0] * row_scale, d[1] * row_scale);
        }
        store_transposed(mine + (8 * m + lane) * 128 + 16 * chunk, words);
      }
    }
    named_sync(1 + consumer, 128);
    const int part = lane % 8;
    for (int token = 4 * warp + lane / 8; token < place.rows; token += 16) {
      uint32_t words[4];
      load_shared(words, mine + token * 128 + 16 * (part ^ (token % 8)));
      *reinterpret_cast<uint4*>(p.y + (size_t(place.row) + token) * p.n + column + 8 * part) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
    named_sync(1 + consumer, 128);
  }
}

template <typename P, int kN>
__device__ __forceinline__ void consume_tile(const Problem& p, const Shared& at, Cursor<P::kStages>& ring,
                                             const Place& place, uint32_t staged_parity) {
  float total[2][2][kN / 2];
  const uint32_t stage = at.base + ring.stage * P::kStageBytes, kept = at.places + 32 * (threadIdx.x / 32);
  __syncwarp();  // every lane has read what was kept of the tile before
  store_place(kept, place);
  store_shared(kept + 16, __float_as_uint(load_shared(stage + P::kRowScalesAt + 4 * (threadIdx.x / 128))));
  multiply_tile<P, kN>(total, p, at, ring, place);
  const int thread = thread_again();
  const float row_scale = load_shared(kept + 16);
  if constexpr (P::kGateUp) {
    mbarrier_wait(at.staged_empty, staged_parity ^ 1);
    stage_hidden<P, kN>(total, p, row_scale, at.base + P::kStaged, thread);
  } else {
    store_rows<P, kN>(total, p, load_place(kept), row_scale, at.base + P::kStaged, thread);
  }
}

template <typename P>
__device__ __forceinline__ void consume(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK;
  const int consumer = uniform(threadIdx.x / 128);
  Cursor<P::kStages> ring;
  uint32_t staged_parity = 0;
  for (int round = 0; item_of_round(round) < num_items; ++round, staged_parity ^= 1) {
    mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
    Place place = load_place(at.base + ring.stage * P::kStageBytes + P::kPlaceAt);
    place = {uniform(place.expert), uniform(place.row), uniform(place.rows), uniform(place.column)};
    if (place.column + 128 * consumer >= p.n) {
      for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
        mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
        __syncwarp();
        if (is_arriving()) mbarrier_arrive(at.empty + 8 * ring.stage);
      }
    } else if (place.rows > 96) {
      consume_tile<P, 64>(p, at, ring, place, staged_parity);
    } else if (place.rows > 64) {
      consume_tile<P, 48>(p, at, ring, place, staged_parity);
    } else {
      consume_tile<P, 32>(p, at, ring, place, staged_parity);
    }
    if constexpr (P::kGateUp) {
      // Both consumers stage; the second, which may end later, quantises.
      if (consumer == 0) {
        __syncwarp();
        if (is_arriving()) mbarrier_arrive(at.staged_full);
      } else {
        named_sync(1, 128);
        mbarrier_wait(at.staged_full, staged_parity);
        quantize_staged<P>(p, place, at.base + P::kStaged, threadIdx.x);
        __syncwarp();
        if (is_arriving()) mbarrier_arrive(at.staged_empty);
      }
    }
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1) product(const __grid_constant__ Problem p) {
  extern __shared__ uint8_t raw[];
  Shared at;
  at.base = uniform(int(shared_address(raw) + 1023) & ~1023);
  at.full = at.base + P::kBarriers;
  at.empty = at.full + 8 * P::kStages;
  at.staged_full = at.empty + 8 * P::kStages;
  at.staged_empty = at.staged_full + 8;
  at.places = at.base + P::kPlaces;
  if (threadIdx.x == 0) {
    for (int i = 0; i < P::kStages; ++i) {
      mbarrier_init(at.full + 8 * i, kWarpArrivals);
      mbarrier_init(at.empty + 8 * i, 8 * kWarpArrivals);  // eight multiplying warps
    }
    mbarrier_init(at.staged_full, 4 * kWarpArrivals);
    mbarrier_init(at.staged_empty, 4 * kWarpArrivals);
    mbarrier_init_fence();
  }
  if (threadIdx.x < kTables) {
    const float unit = __uint_as_float(uint32_t(int(threadIdx.x) + kLowestShift + 127) << 23);
    const uint32_t entry = at.base + P::kTable + 8 * threadIdx.x;
    store_shared(entry, pack_e4m3(0.f, 0.5f * unit, unit, 1.5f * unit));
    store_shared(entry + 4, pack_e4m3(2.f * unit, 3.f * unit, 4.f * unit, 6.f * unit));
  }
  __syncthreads();
  const int runs = (p.n + kItemRows - 1) / kItemRows;
  const int num_items = uniform(__ldg(p.rows.tiles + p.rows.num_experts) * runs);
  if (threadIdx.x < 256) {
    registers_grow<240>();
    consume<P>(p, num_items, at);
  } else {
    registers_shrink<24>();
    if (threadIdx.x < 288) fill<P>(p, num_items, at);
  }
}

// Tensor maps and launch. `rows` bounds the rows of x.
template <typename P>
cudaError_t launch(Problem p, const void* x, const float* x_scales, int x_scales_stride, const void* codes,
                   const void* offsets, int rows, int max_tiles, cudaStream_t stream) {
  const uint64_t runs = (p.n + kItemRows - 1) / kItemRows, k_blocks = (p.k + kBlockK - 1) / kBlockK;
  const uint64_t experts = p.rows.num_experts, row_bytes = p.k / 2;
  const uint64_t x_sizes[2] = {uint64_t(p.k), uint64_t(rows)}, x_strides[1] = {uint64_t(p.k)};
  const uint32_t x_box[2] = {kBlockK, kBoxTokens};
  cudaError_t error =
      encode_tensor_map(&p.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, x, x_sizes, x_strides, x_box, CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  const uint64_t scale_sizes[2] = {uint64_t(rows), k_blocks}, scale_strides[1] = {uint64_t(x_scales_stride) * 4};
  const uint32_t scale_box[2] = {kScaleBox, 1};
  error = encode_tensor_map(&p.x_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, x_scales, scale_sizes, scale_strides,
                            scale_box, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (error != cudaSuccess) return error;
  // Rows of all experts in a row: past the last row of an expert lie those of the next, whose sums are not stored.
  const uint64_t parities = P::kGateUp ? 2 : 1;
  const uint64_t code_sizes[3] = {row_bytes, experts * p.n / parities, parities};
  const uint64_t code_strides[2] = {row_bytes * parities, row_bytes};
  const uint32_t code_box[3] = {kRowCodes, uint32_t(kItemRows / parities), uint32_t(parities)};
  error = encode_tensor_map(&p.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, codes, code_sizes, code_strides, code_box,
                            CU_TENSOR_MAP_SWIZZLE_NONE);
  if (error != cudaSuccess) return error;
  const uint64_t offset_sizes[2] = {kItemRows, experts * runs * k_blocks}, offset_strides[1] = {kOffsetBytes};
  const uint32_t offset_box[2] = {kItemRows, 1};
  error = encode_tensor_map(&p.offsets, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, offsets, offset_sizes, offset_strides,
                            offset_box, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (error != cudaSuccess) return error;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(product<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t items = int64_t(max_tiles) * int64_t(runs);
  product<P><<<unsigned(items < processors ? items : processors), P::kThreads, P::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace rose::moe::swapped
