// Grouped product of MXFP4 weights and E4M3 activations for Hopper, operands swapped as in prefill_swapped.cuh, but with
// one scale per token: nothing happens to the sums of a tile until its end.
//
// A tile is 128 rows of an expert's matrix and up to 256 of its tokens. Two warpgroups multiply 64 rows each by all of
// the tile's tokens, 64 x 256 sums in 128 registers; one warp of a third fills the ring of stages by TMA.
//   widths   products are as wide as the tile has tokens, to the next 16 (WIDTHS): a short tile costs what it has.
//   operand  of the stage after next is expanded into a second set of registers while the products of this one run, so
//            that each warpgroup always has products on their way.
//   scales   a token's one scale and the rows' one power of two meet the sums at the end of the tile. The SwiGLU is at
//            most limit (limit + 1), which is 448 in units of `hidden_scale`: its E4M3 numbers need no largest one.
//   sums     stay in the tensor core from the first product to the last: what its additions cut off is in
//            docs/experiments/prefill_experts_wide.md, as a calculation, and measured by moe_prefill_wide.py.
//   rows     gate and up of a channel lie in one thread: fragment row 8h + g of warp w of consumer c is channel
//            8 chunk + g of the tile's 64, chunk = 4 (w / 2) + 2c + w % 2, h = 0 gate, h = 1 up; so the bytes of a
//            consumer lie together in the order of columns that down reads. Down: row 64c + 16w + 8h + g.
// Codes, tables and the order of columns are those of prefill_swapped.cuh.
#pragma once

#include "../../src/rose/kernels/moe_experts/prefill_swapped.cuh"
#include "wide_ptx.cuh"

namespace rose::moe::wide {

using swapped::block_of;
using swapped::expand_word;
using swapped::kBoxTokens;
using swapped::kLowestShift;
using swapped::kRowCodes;
using swapped::kTables;

constexpr int kItemRows = 128;
constexpr int kCodeBytes = kItemRows * kRowCodes, kOffsetBytes = kItemRows * 4;

struct Problem {
  // x [R, K] in the order of prefill_swapped.cuh; codes [P, E N / P, K / 2], P = 2 (gate, up) or 1; offsets
  // [E, ceil(N / 128), ceil(K / 128), 128] words, two threads each
  CUtensorMap x, codes, offsets;
  Rows rows;
  const float* token_scales;  // [R], or null: `token_scale` for all
  float token_scale;
  const float* row_scales;  // [E, ceil(N / 128)]
  const void* bias;         // [E, N]
  int bias_is_bf16;
  int n, k;
  uint8_t* hidden;
  float alpha, limit, hidden_scale;
  __nv_bfloat16* y;  // of down, or the SwiGLU with kBf16
  int late_ns;  // by which the second consumer begins later; below what the ring holds
  int ahead;    // stages by which codes are asked into the L2 cache before they are copied; 0: never
};

// kPromote: sums leave the tensor core every two stages; totals and sums of 64 x 128 then fill the registers of 64 x 256.
// kBf16: gate-up leaves its SwiGLU as bf16, columns in order, for whoever rounds it in groups.
template <bool kGateUpP, bool kPromoteP, bool kBf16P = false>
struct Plan {
  static constexpr bool kGateUp = kGateUpP, kPromote = kPromoteP, kBf16 = kBf16P;
  static constexpr int kTokens = kPromote ? 128 : 256;
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

// As in prefill_swapped.cuh, other sizes.
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

// What a tile's end needs, as this lane of the filling warp asks for it: scales of tokens times that of the rows, all
// signs turned back, and the bias.
template <int kTokens>
struct End {
  float scales[kTokens / 32], bias[kItemRows / 32], row_scale;

  __device__ __forceinline__ void load(const Problem& p, const Place& place, int lane) {
#pragma unroll
    for (int i = 0; i < kTokens / 32; ++i) {
      const int token = min(32 * i + lane, place.rows - 1);
      scales[i] = p.token_scales ? __ldg(p.token_scales + place.row + token) : p.token_scale;
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
  End<P::kTokens> end;
  Place place, next;
  bool has_next = item_of_round(0) < num_items;
  const auto look_up = [&](int round) {
    next = locate(p.rows, item_of_round(round), runs);
    end.load(p, next, lane);
  };
  const auto row_of = [&](const Place& of) {
    const int row = of.expert * p.n + of.column;
    return P::kGateUp ? row / 2 : row;
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
        tma_load_2d(stage + P::kOffsetsAt, &p.offsets, barrier, 0,
                    (place.expert * runs + place.column / kItemRows) * k_blocks + kb);
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
      const int later = i + p.ahead;
      if (lane == 0 && p.ahead > 0 && later < (has_next ? 2 * k_blocks : k_blocks)) {
        const int of_tile = later < k_blocks ? later : later - k_blocks;
        const int column = block_of(of_tile, k_full, k_blocks) * kRowCodes;
        prefetch_3d(&p.codes, column, row_of(later < k_blocks ? place : next), 0);
      }
    }
  }
}

// Where a thread finds its things in every stage; `shift`: its two bytes in a word of offsets.
struct Mine {
  uint32_t codes, offsets, shift;
};

// The operand of one stage: kSteps products of 32 along K. All signs are turned (expand_word).
template <typename P, int kSteps>
__device__ __forceinline__ void expand(uint32_t (&a)[4][4], uint32_t stage, const Mine& mine, uint32_t tables) {
  const uint32_t offsets = __float_as_uint(load_shared(stage + P::kOffsetsAt + mine.offsets)) >> mine.shift;
  // The half group of a ragged K has blocks of 16 codes: eight bytes a thread.
  const uint32_t codes_at = stage + P::kCodesAt + mine.codes - (kSteps == 2 ? 8 * (threadIdx.x % 4) : 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t table[2], codes[kSteps];
    load_shared(codes, codes_at + h * P::kHalfPitch);
    load_shared(table, tables + (offsets >> (8 * h) & 255));
#pragma unroll
    for (int v = 0; v < kSteps; ++v) expand_word(codes[v], table, a[v][h], a[v][h + 2]);
  }
}

// One stage, whose operand is in `now`. Its products run while those of the stage before end: then that stage's place is
// given back, and its registers, `next`, get the operand of the stage to come, which has four products.
template <typename P, int kN, int kSteps>
__device__ __forceinline__ void multiply_stage(float (&sums)[kN / 2], uint32_t (&now)[4][4], uint32_t (&next)[4][4],
                                               const Shared& at, Cursor<P::kStages>& ring, uint32_t& before,
                                               const Mine& mine, int accumulate, bool has_next) {
  const uint64_t x = descriptor_swizzle128(uniform(at.base + ring.stage * P::kStageBytes));
  wgmma_fence();
#pragma unroll
  for (int v = 0; v < kSteps; ++v) wgmma_e4m3<kN>(sums, now[v], advance(x, 32 * v), v > 0 || accumulate);
  wgmma_commit();
  const uint32_t done = before;
  before = at.empty + 8 * ring.stage;
  ring.advance();
  if (has_next) mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
  wgmma_wait<1>();
  __syncwarp();
  if (done != 0 && is_arriving()) mbarrier_arrive(done);
  // HAZARD: loaded before that wait, codes may be expanded before it, into registers that products still read.
  if (has_next) expand<P, 4>(next, at.base + ring.stage * P::kStageBytes, mine, at.base + P::kTable);
}

template <typename P>
__device__ __forceinline__ int code_row(int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, g = thread % 32 / 4;
  return P::kGateUp ? 8 * (4 * (warp / 2) + 2 * consumer + warp % 2) + g : 64 * consumer + 16 * warp + g;
}

// 64 rows of a tile by one consumer, from the first stage, the half one, to the last. LIMIT: K = 128 k + 64; were a first
// half stage a choice, ptxas would serialise all products, because their sums begin in two places.
template <typename P, int kN>
__device__ __forceinline__ void multiply_tile(float (&total)[kN / 2], const Problem& p, const Shared& at,
                                              Cursor<P::kStages>& ring) {
  const int thread = threadIdx.x, k_full = p.k / kBlockK;
  const Mine mine = {uint32_t(code_row<P>(thread) * kRowCodes + 16 * (thread % 4)), uint32_t(4 * (thread / 2)),
                     uint32_t(16 * (thread % 2))};
  uint32_t a[2][4][4], before = 0;
  float part[kN / 2];  // of use only with kPromote
  float(&sums)[kN / 2] = P::kPromote ? part : total;
  if constexpr (P::kPromote) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) total[i] = 0.f;
  }
  expand<P, 2>(a[1], at.base + ring.stage * P::kStageBytes, mine, at.base + P::kTable);
  multiply_stage<P, kN, 2>(sums, a[1], a[0], at, ring, before, mine, 0, k_full > 0);
  int accumulate = 1;
  for (int left = k_full; left > 0; left -= 2) {
    multiply_stage<P, kN, 4>(sums, a[0], a[1], at, ring, before, mine, accumulate, left > 1);
    if (left == 1) break;
    multiply_stage<P, kN, 4>(sums, a[1], a[0], at, ring, before, mine, 1, left > 2);
    if constexpr (P::kPromote) {
      if (left == 2) break;
      wgmma_wait<0>();
      settle(part);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) total[i] += part[i];
      accumulate = 0;
    }
  }
  wgmma_wait<0>();
  settle(sums);
  __syncwarp();
  if (is_arriving()) mbarrier_arrive(before);
  if constexpr (P::kPromote) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) total[i] += part[i];
  }
}

// SwiGLU of two tokens next to each other: `total` is four sums of a fragment, gate and up.
__device__ __forceinline__ void swiglu_pair(float (&hidden)[2], const float* total, const uint32_t (&scales)[2],
                                            float gate_bias, float up_bias, float alpha2, float limit, float inverse) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float scale = __uint_as_float(scales[c]);
    const float gate = fminf(total[c] * scale + gate_bias, limit);
    const float up = fminf(fmaxf(total[2 + c] * scale + up_bias, -limit), limit);
    // As fast_swiglu, in units of hidden_scale.
    hidden[c] = gate * fast_reciprocal(1.f + fast_exp2(alpha2 * gate)) * (up * inverse + inverse);
  }
}

// SwiGLU of a consumer's 32 channels as E4M3, through shared memory to where they belong. Staged: for the pair q of
// tokens 16 (q / 8) + q % 8 and eight further, the chunks of four warps, each eight channels of both tokens in turns.
template <typename P, int kN>
__device__ __forceinline__ void store_hidden(const float (&total)[kN / 2], const Problem& p, const Place& place,
                                             uint32_t end, uint32_t staged, int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const float alpha2 = -1.4426950408889634f * p.alpha, inverse = 1.f / p.hidden_scale;
  const uint32_t bias = end + P::kBiasAt + 8 * code_row<P>(thread);
  const float gate_bias = load_shared(bias), up_bias = load_shared(bias + 4);
  named_sync(1 + consumer, 128);  // what was staged of the tile before is stored
#pragma unroll
  for (int m = 0; m < kN / 16; m += 4) {  // matrix i of four: 16 tokens
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4 && m + i < kN / 16; ++i) {
      float hidden[2][2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int j = 2 * (m + i) + b;
        uint32_t scales[2];
        load_shared(scales, end + 4 * (8 * j + 2 * (thread % 4)));
        swiglu_pair(hidden[b], total + 4 * j, scales, gate_bias, up_bias, alpha2, p.limit, inverse);
      }
      words[i] = pack_e4m3(hidden[0][0], hidden[1][0], hidden[0][1], hidden[1][1]);
    }
    const int pair = 8 * m + lane;
    store_transposed(staged + 64 * pair + 16 * (warp ^ (pair / 2 % 4)), words);
  }
  named_sync(1 + consumer, 128);
  const int first = place.column / 2, group = first & ~127, part = first % 128 / 64;
  const bool is_half = p.n / 2 - group < 128;
#pragma unroll 1
  for (int task = thread % 128; task < kN; task += 128) {
    const int pair = task / 2, v = task % 2;
    uint32_t low[4], high[4];
    load_shared(low, staged + 64 * pair + 16 * (v ^ (pair / 2 % 4)));
    load_shared(high, staged + 64 * pair + 16 * ((v + 2) ^ (pair / 2 % 4)));
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int token = 16 * (pair / 8) + pair % 8 + 8 * b;
      if (token >= place.rows) break;
      uint8_t* row = p.hidden + (size_t(place.row) + token) * (p.n / 2) + group;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const uint32_t order = b ? 0x7531 : 0x6420;
        const uint32_t one = __byte_perm(low[2 * u], low[2 * u + 1], order);
        const uint32_t other = __byte_perm(high[2 * u], high[2 * u + 1], order);
        if (is_half) {
          *reinterpret_cast<uint32_t*>(row + 32 * v + 16 * u + 4 * consumer) = one;
          *reinterpret_cast<uint32_t*>(row + 32 * v + 16 * u + 4 * consumer + 8) = other;
        } else {
          *reinterpret_cast<uint2*>(row + 32 * (2 * consumer + v) + 16 * u + 8 * part) = make_uint2(one, other);
        }
      }
    }
  }
}

// The same as bf16, columns in order. Staged: for each token the chunks of four warps, eight channels each.
template <typename P, int kN>
__device__ __forceinline__ void store_bf16(const float (&total)[kN / 2], const Problem& p, const Place& place,
                                           uint32_t end, uint32_t staged, int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const float alpha2 = -1.4426950408889634f * p.alpha;
  const uint32_t bias = end + P::kBiasAt + 8 * code_row<P>(thread);
  const float gate_bias = load_shared(bias), up_bias = load_shared(bias + 4);
  named_sync(1 + consumer, 128);  // what was staged of the tile before is stored
#pragma unroll
  for (int m = 0; m < kN / 8; m += 4) {  // matrix i of four: eight tokens
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4 && m + i < kN / 8; ++i) {
      uint32_t scales[2];
      float hidden[2];
      load_shared(scales, end + 4 * (8 * (m + i) + 2 * (thread % 4)));
      swiglu_pair(hidden, total + 4 * (m + i), scales, gate_bias, up_bias, alpha2, p.limit, 1.f);
      words[i] = pack_bf16(hidden[0], hidden[1]);
    }
    const int token = 8 * m + lane;
    store_transposed(staged + 64 * token + 16 * (warp ^ (token / 2 % 4)), words);
  }
  named_sync(1 + consumer, 128);
  const int chunk = lane % 4, channel = place.column / 2 + 8 * (4 * (chunk / 2) + 2 * consumer + chunk % 2);
  for (int token = 8 * warp + lane / 4; token < place.rows; token += 32) {
    uint32_t words[4];
    load_shared(words, staged + 64 * token + 16 * (chunk ^ (token / 2 % 4)));
    *reinterpret_cast<uint4*>(p.y + (size_t(place.row) + token) * (p.n / 2) + channel) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Output rows of a consumer through its staged 128 tokens x 64 rows, so that whole lines are written.
template <typename P, int kN>
__device__ __forceinline__ void store_rows(const float (&total)[kN / 2], const Problem& p, const Place& place,
                                           uint32_t end, uint32_t staged, int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const int column = place.column + 64 * consumer;
#pragma unroll
  for (int first = 0; first < kN; first += 128) {
    named_sync(1 + consumer, 128);  // what was staged before is stored
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float bias = load_shared(end + P::kBiasAt + 4 * (code_row<P>(thread) + 8 * h));
      const int chunk = (2 * warp + h) ^ (lane % 8);
#pragma unroll
      for (int m = first / 8; m < kN / 8 && m < first / 8 + 16; m += 4) {  // matrix i of four: eight tokens
        uint32_t words[4] = {};
#pragma unroll
        for (int i = 0; i < 4 && m + i < kN / 8; ++i) {
          const float* d = total + 4 * (m + i) + 2 * h;
          uint32_t scales[2];
          load_shared(scales, end + 4 * (8 * (m + i) + 2 * (thread % 4)));
          words[i] = pack_bf16(d[0] * __uint_as_float(scales[0]) + bias, d[1] * __uint_as_float(scales[1]) + bias);
        }
        store_transposed(staged + (8 * m - first + lane) * 128 + 16 * chunk, words);
      }
    }
    named_sync(1 + consumer, 128);
    const int part = lane % 8;
    for (int token = 4 * warp + lane / 8; token < min(128, place.rows - first); token += 16) {
      uint32_t words[4];
      load_shared(words, staged + token * 128 + 16 * (part ^ (token % 8)));
      *reinterpret_cast<uint4*>(p.y + (size_t(place.row) + first + token) * p.n + column + 8 * part) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <typename P, int kN>
__device__ __forceinline__ void consume_tile(const Problem& p, const Shared& at, Cursor<P::kStages>& ring,
                                             uint32_t end) {
  float total[kN / 2];
  multiply_tile<P, kN>(total, p, at, ring);
  // Read anew: neither place nor thread stays in registers over the products.
  const int thread = thread_again();
  const Place place = load_place(end + P::kPlaceAt);
  const uint32_t staged = at.base + P::kStaged + thread / 128 * P::kStagedBytes;
  if constexpr (P::kBf16) store_bf16<P, kN>(total, p, place, end, staged, thread);
  else if constexpr (P::kGateUp) store_hidden<P, kN>(total, p, place, end, staged, thread);
  else store_rows<P, kN>(total, p, place, end, staged, thread);
}

// The narrowest products that hold a tile's tokens.
template <typename P, int kN, int... kWider>
__device__ __forceinline__ void consume_by_width(const Problem& p, const Shared& at, Cursor<P::kStages>& ring, int tokens,
                                                 uint32_t end) {
  if constexpr (sizeof...(kWider) == 0 || kN >= P::kTokens) {
    consume_tile<P, kN>(p, at, ring, end);
  } else {
    if (tokens <= kN) consume_tile<P, kN>(p, at, ring, end);
    else consume_by_width<P, kWider...>(p, at, ring, tokens, end);
  }
}

template <typename P>
__device__ __forceinline__ void consume(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK;
  const int consumer = uniform(threadIdx.x / 128);
  Cursor<P::kStages> ring;
  Cursor<2> ends;
  if (consumer == 1) __nanosleep(p.late_ns);  // so that one's tile ends beside the other's products
  for (int round = 0; item_of_round(round) < num_items; ++round, ends.advance()) {
    mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
    const uint32_t end = at.base + P::kEnds + ends.stage * P::kEndBytes;
    const Place place = load_place(end + P::kPlaceAt);
    if (uniform(place.column) + 64 * consumer >= p.n) {
      for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
        mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
        __syncwarp();
        if (is_arriving()) mbarrier_arrive(at.empty + 8 * ring.stage);
      }
    } else {
      consume_by_width<P, ROSE_WIDTHS>(p, at, ring, uniform(place.rows), end);
    }
    __syncwarp();
    if (is_arriving()) mbarrier_arrive(at.end_empty + 8 * ends.stage);
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1) product(const __grid_constant__ Problem p) {
  extern __shared__ uint8_t raw[];
  Shared at;
  at.base = uniform(int(shared_address(raw) + 1023) & ~1023);
  at.full = at.base + P::kBarriers;
  at.empty = at.full + 8 * P::kStages;
  at.end_empty = at.empty + 8 * P::kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < P::kStages; ++i) {
      mbarrier_init(at.full + 8 * i, kWarpArrivals);
      mbarrier_init(at.empty + 8 * i, 8 * kWarpArrivals);  // eight multiplying warps
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(at.end_empty + 8 * i, 8 * kWarpArrivals);
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
    registers_grow<232>();
    consume<P>(p, num_items, at);
  } else {
    registers_shrink<40>();
    if (threadIdx.x < 288) fill<P>(p, num_items, at);
  }
}

// Tensor maps and launch. `rows` bounds the rows of x.
template <typename P>
cudaError_t launch(Problem p, const void* x, const void* codes, const void* offsets, int rows, int max_tiles,
                   cudaStream_t stream) {
  if (p.k % kBlockK != kBlockK / 2) return cudaErrorInvalidValue;
  const uint64_t runs = (p.n + kItemRows - 1) / kItemRows, k_blocks = (p.k + kBlockK - 1) / kBlockK;
  const uint64_t experts = p.rows.num_experts, row_bytes = p.k / 2;
  const uint64_t x_sizes[2] = {uint64_t(p.k), uint64_t(rows)}, x_strides[1] = {uint64_t(p.k)};
  const uint32_t x_box[2] = {kBlockK, kBoxTokens};
  cudaError_t error =
      encode_tensor_map(&p.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, x, x_sizes, x_strides, x_box, CU_TENSOR_MAP_SWIZZLE_128B);
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

// One warp per token, sixteen columns a lane and round, one scale for all columns: quantised once, written to each row in
// the order of prefill_swapped.cuh (quantize_wide of prefill_rows.cuh has the same with a scale for 128 columns).
template <int kChosenMax, int kRounds>
__global__ void quantize_tokens(const __nv_bfloat16* x, const int* row_of_pair, uint8_t* values, float* scales,
                                int tokens, int columns, int chosen) {
  const int64_t token = tokens - 1 - (int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32);
  if (token < 0) return;
  const int lane = threadIdx.x % 32, part = lane % 8;
  uint4 raw[kRounds][2] = {};
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int column = 512 * i + 16 * lane;
    if (column < columns) {
      const uint4* from = reinterpret_cast<const uint4*>(x + token * columns + column);
      raw[i][0] = __ldcs(from);
      raw[i][1] = __ldcs(from + 1);
    }
  }
  int rows[kChosenMax];
#pragma unroll
  for (int k = 0; k < kChosenMax; ++k) rows[k] = k < chosen ? __ldg(row_of_pair + token * chosen + k) : -1;
  const auto value = [&](int i, int c) {
    const uint4& four = raw[i][c / 8];
    const uint32_t words[4] = {four.x, four.y, four.z, four.w}, word = words[c % 8 / 2];
    return __uint_as_float(c % 2 ? word & 0xffff0000u : word << 16);
  };
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
#pragma unroll
    for (int c = 0; c < 16; ++c) amax = fmaxf(amax, fabsf(value(i, c)));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  const float scale = fmaxf(amax, 1e-4f) / 448.f, inverse = 1.f / scale;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    uint32_t packed[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      packed[w] = pack_e4m3(value(i, 4 * w) * inverse, value(i, 4 * w + 1) * inverse, value(i, 4 * w + 2) * inverse,
                            value(i, 4 * w + 3) * inverse);
    }
    const int group = 512 * i + lane / 8 * 128;
    const bool is_half = group + 64 == columns;
    const int turn = is_half ? part % 4 : part / 2;
    transpose_lanes(packed, turn, is_half ? 1 : 2);
    const int place = group + 16 * (is_half ? part : 4 * (part % 2) + turn);
#pragma unroll
    for (int k = 0; k < kChosenMax; ++k) {
      if (rows[k] >= 0 && 512 * i + 16 * lane < columns) {
        *reinterpret_cast<uint4*>(values + int64_t(rows[k]) * columns + place) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kChosenMax; ++k) {
    if (lane == k && rows[k] >= 0) scales[rows[k]] = scale;
  }
}

}  // namespace rose::moe::wide
