// Experts of small batches on Hopper, 64 rows at a time: codes pass from memory through a ring in shared memory
// (decode_chunks.cuh) into registers and, as E4M3, into wgmma.
//
//   weights  are operand A, in registers: unpacked once, whatever the number of tokens up to kN. A code with its block's
//            scale becomes an E4M3 number by a table (e2m1_tables.cuh), in units of one power of two for the 64 rows of the
//            tile and all of K (e4m3_weights.py), so that sums need no scales.
//   tokens   are operand B, exact in two parts: an activation (8 bits of significand) times a power of two of its token is
//            the sum of two E4M3 numbers (4 bits each), of which the second is cut at 2^-17 of the token's largest. Of a
//            product's 2 kN columns the first kN have the first parts, the others the second.
//   sums     stay in the tensor core for a chunk of 256 columns; its additions keep 13 or 14 bits, so that float32
//            registers add up the chunks of a warpgroup (docs/experiments/decode_experts.md), and then those of all, in
//            order.
//   columns  thread (g, t) of a warp takes block t of a group of 128 columns, 32 codes of a row as they lie. Word v of the
//            four becomes its bytes of product v of the four: byte 32v + 16u + 4t + b of the group is column 32t + 8v + 4u +
//            b, as in prefill_swapped.cuh. Past the last column codes and activations are zeros.
//   rows     thread (g, t) of warp w has rows 16w + 2p and the one after it of the tile, a gate and its up: fragment rows g
//            and g + 8. p is g with its two lower bits exchanged, so that eight lanes of a load meet different banks.
#pragma once

#include "decode_chunks.cuh"
#include "decode_e4m3_ptx.cuh"
#include "e2m1_tables.cuh"
#include "wgmma_fp8_registers.cuh"

namespace rose::moe_decode {

constexpr int kMostWarps = 16;

// Of its own: tables, the factor of each token, and what the warps find to be the largest of their rows, in two turns.
template <class S>
__host__ __device__ RingLayout e4m3_layout(const Call& c) {
  return RingLayout::make<S>(c, kTableBytes + S::kN * 4 + 2 * kMostWarps * 4);
}

// Copy the activations of a hit to shared memory, split in two: for 128 columns a tile of kN rows for the first
// parts, then one for the second; K-major with 128-byte swizzle. Up to four warps share a row. By all warps that multiply,
// which meet before it writes. `asked()`: called once the first activations are on their way.
template <int kN, bool kGateUp, int kWarps, class Asked>
__device__ __forceinline__ void split_operand(const Call& c, const int4& hit, const uint16_t* order, uint8_t* x_shared,
                                              float* factors, uint32_t (*largest)[kMostWarps], Asked asked) {
  constexpr int kMost = 12;  // pieces of 8 columns per lane: rows of up to 3072
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pieces = c.columns / 8;
  const int share = hit.z * 4 <= kWarps ? 4 : hit.z * 2 <= kWarps ? 2 : 1, rows = kWarps / share;
  for (int first = 0, round = 0; first < hit.z; first += rows, ++round) {
    const int row = first + warp / share, part = warp % share;
    const bool is_in = row < hit.z && warp / share < rows;
    uint4 v[kMost];
    uint32_t most = 0;
    if (is_in) {
      const int pair = order[hit.y + row];
      const __nv_bfloat16* source = c.x + static_cast<size_t>(kGateUp ? pair / c.chosen : pair) * c.columns;
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int piece = (i * share + part) * 32 + lane;
        v[i] = uint4{0, 0, 0, 0};
        if (piece < pieces) v[i] = __ldcg(reinterpret_cast<const uint4*>(source + piece * 8));
      }
    }
    if (round == 0) asked();
    if (is_in) {
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        most = larger_magnitudes(most, larger_magnitudes(larger_magnitudes(v[i].x, v[i].y), larger_magnitudes(v[i].z, v[i].w)));
      }
      most = max(most & 0x7FFF, most >> 16 & 0x7FFF);
      most = warp_max(most);
      if (lane == 0) largest[round & 1][warp] = most;
    }
    named_sync(kMultiplyBarrier, kWarps * 32);
    if (!is_in) continue;
    for (int i = 0; i < share; ++i) most = max(most, largest[round & 1][warp - part + i]);
    // The largest comes to lie between 2^7 and 2^8; powers of two stay within those of float32.
    const int exponent = max(7 + 127 - static_cast<int>(most >> 7), -119);
    const int shift = min(exponent, 120);
    const float scale = __uint_as_float((127 + shift) << 23);
    if (part == 0 && lane == 0) {
      // Infinity and NaN pass on.
      factors[row] = most >= 0x7F80 ? __uint_as_float(0x7FC00000u) : __uint_as_float((127 - shift) << 23);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int piece = (i * share + part) * 32 + lane;
      if (piece >= (pieces + 15) / 16 * 16) break;  // zeros up to a whole group
      const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
      uint32_t one[4], two[4];  // first parts, second parts
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float a = __uint_as_float(words[j] << 16) * scale, b = __uint_as_float(words[j] & 0xFFFF0000u) * scale;
        one[j] = to_e4m3(a, b);
        const float2 back = from_e4m3(one[j]);
        two[j] = to_e4m3(a - back.x, b - back.y);
      }
      const int group = piece >> 4, t = piece >> 2 & 3, place = 2 * (piece & 3), turn = row & 7;
      uint8_t* target = x_shared + (group * 2 * kN + row) * 128 + 4 * t;
      auto store = [&](int part, int u, uint32_t word) {
        *reinterpret_cast<uint32_t*>(target + part * kN * 128 + ((place + u) ^ turn) * 16) = word;
      };
      store(0, 0, one[0] | one[1] << 16), store(0, 1, one[2] | one[3] << 16);
      store(1, 0, two[0] | two[1] << 16), store(1, 1, two[2] | two[3] << 16);
    }
  }
}

// Where a thread finds its things in a chunk and among the scales of a tile.
struct Mine {
  int row;  // of the tile, the first of its two
  uint32_t codes;
  uint32_t forties;  // see expand_word

  __device__ static int row_of(int warp, int lane) {
    const int g = lane >> 2;
    return 16 * warp + 2 * ((g & 4) | (g & 1) << 1 | (g >> 1 & 1));
  }
  __device__ static Mine of(int warp, int lane, const uint2* tables) {
    const int t = lane & 3, row = row_of(warp, lane), turn = row & 7;
    return {row, static_cast<uint32_t>(row * 128 + (t ^ turn) * 16), tables[kTables].x};
  }
};
// Of an address that `Mine` gives: the row after, the second group of a chunk.
constexpr uint32_t kNextRow = 128 | 16, kSecondGroup = 64;

// What a group of 128 columns is for one thread: operands of four products.
using Operand = uint32_t[4][4];

// `codes`: the address of this thread's codes; `scales`: those of its block in its two rows.
template <int kColumns>
__device__ __forceinline__ void expand(Operand& a, uint32_t codes, const uint8_t* scales, int exponent,
                                       const uint2* tables, uint32_t forties) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t words[4];
    load_codes(words, codes ^ (h * kNextRow));
    const uint2 table = tables[table_of(scales[h * (kColumns / 32)], exponent)];
#pragma unroll
    for (int v = 0; v < 4; ++v) expand_word(words[v], table, forties, a[v][h], a[v][h + 2]);
  }
}

// `x`: the descriptor's lower word of the group's tokens. kAdds false: sums begin here.
template <int kN, bool kAdds>
__device__ __forceinline__ void multiply_group(float (&sums)[kN], const Operand& a, uint32_t x) {
  wgmma_fence();
#pragma unroll
  for (int v = 0; v < 4; ++v) wgmma_e4m3<2 * kN>(sums, a[v], whole_descriptor(x + 2 * v), kAdds || v > 0);
  wgmma_commit();
}

// A warpgroup's chunks of one tile, from `chunk` on: sums of this thread's two rows, in units of the tile's weights, all
// signs turned. `x`: the descriptor's lower word of all tokens; `scales`: those of the thread's first row.
template <int kColumns, class S>
__device__ __forceinline__ void multiply_tile(float (&d)[S::kN / 2], int chunk, const Ring<S>& ring, Turn<S>& at,
                                              const Mine& mine, const uint8_t* scales, int exponent, const uint2* tables,
                                              uint32_t x, int lane) {
  constexpr int kN = S::kN, kChunks = (kColumns + kChunkColumns - 1) / kChunkColumns;
  constexpr int kLastGroup = (kColumns + 127) / 128 - 1;
  constexpr uint32_t kGroupX = 2 * kN * 128 / 16;
  static_assert(kChunks >= S::kGroups, "each warpgroup has a part of each tile");
  Operand a[2];
  float sums[kN];
  auto add = [&] {
    wgmma_wait<0>();
    settle(sums);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] += sums[i] + sums[i + kN / 2];
  };
  auto give_back = [&](int stage) {
    __syncwarp();
    mbarrier_arrive_warp(ring.empty + 8 * stage, lane);
  };
  auto expand_group = [&](Operand& to, int group) {
    const uint32_t codes = ring.chunks + at.stage * kChunkBytes + mine.codes;
    const uint8_t* of_block = scales + chunk * 8 + group * 4 + (lane & 3);
    expand<kColumns>(to, codes ^ (group * kSecondGroup), of_block, exponent, tables, mine.forties);
  };
  mbarrier_wait(ring.full + 8 * at.stage, at.parity);
  expand_group(a[0], 0);
  bool is_first = true;
#pragma unroll 1
  while (true) {
    if (!is_first) add();
    is_first = false;
    multiply_group<kN, false>(sums, a[0], x + 2 * chunk * kGroupX);
    expand_group(a[1], 1);  // while the first are multiplied
    // Codes past the last group are zeros, whatever they are multiplied with.
    multiply_group<kN, true>(sums, a[1], x + min(2 * chunk + 1, kLastGroup) * kGroupX);
    chunk += S::kGroups;
    if (chunk >= kChunks) break;
    const int before = at.stage;
    at.advance();
    mbarrier_wait(ring.full + 8 * at.stage, at.parity);
    wgmma_wait<1>();
    give_back(before);  // its codes are in registers, since products of them have begun
    // HAZARD: codes are loaded after that wait, or they might be expanded into registers that products still read.
    expand_group(a[0], 0);
  }
  add();
  give_back(at.stage);
  at.advance();
}

// Write SwiGLU or output rows `row` and `row` + 1 of the matrix for tokens `token` and `token` + 1, those that are.
// `d`: both tokens of the first row, of the second, multiples of `unit`; `bias`: of both rows.
template <bool kGateUp>
__device__ __forceinline__ void write_rows(const Call& c, const int4& hit, int row, int token, const float4& d, float unit,
                                           uint32_t bias, const uint16_t* order) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (token + i >= hit.z) break;
    const size_t pair = order[hit.y + token + i];
    const float even = (i == 0 ? d.x : d.y) * unit + __uint_as_float(bias << 16);
    const float odd = (i == 0 ? d.z : d.w) * unit + __uint_as_float(bias & 0xFFFF0000u);
    if constexpr (kGateUp) {
      const float gate = fminf(even, c.limit), up = fminf(fmaxf(odd, -c.limit), c.limit);
      c.act[pair * (c.rows / 2) + row / 2] = __float2bfloat16(gate / (1.0f + __expf(-c.alpha * gate)) * (up + 1.0f));
    } else {
      *reinterpret_cast<float2*>(c.y + pair * c.rows + row) = make_float2(even, odd);
    }
  }
}

// Parts of a tile: [kParts][warpgroup][8 tokens][thread of the warpgroup], each its two rows for two tokens.
template <class S>
__device__ __forceinline__ float4* parts_of(uint8_t* shared, const RingLayout& l, int buffer, int group) {
  return reinterpret_cast<float4*>(shared + l.parts + (buffer * S::kGroups + group) * S::kPartBytes);
}

// What one warpgroup multiplies: its chunks of the block's tiles.
template <bool kGateUp, class S, int kColumns>
__device__ __forceinline__ void multiply_run(const Call& c, const RingLayout& l, uint8_t* shared, const Run& run,
                                             const int4* hits, const uint16_t* order, int group) {
  constexpr int kN = S::kN, kGroups = S::kGroups, kChunks = (kColumns + kChunkColumns - 1) / kChunkColumns;
  const int lane = threadIdx.x & 31;
  const uint2* tables = reinterpret_cast<const uint2*>(shared + l.own);
  const Mine mine = Mine::of((threadIdx.x >> 5) & 3, lane, tables);
  const Ring<S> ring(l, shared);
  float* factors = reinterpret_cast<float*>(shared + l.own + kTableBytes);
  const uint8_t* scales = shared + l.scales + mine.row * (kColumns / 32);
  // Asked for a tile ahead: it comes from memory.
  auto exponent_of = [&](int item) { return item < run.end ? Tile::of(item, run, hits).exponent(c, run) : 0; };
  int next_exponent = exponent_of(run.begin);
  Turn<S> at{group};
  Cursor<S::kParts> part;
  Cursor<S::kScales> scales_at;
  int first = group;  // the warpgroup's first chunk of the tile
  if constexpr (!kGateUp) {
    wait_for_kernel_before();
    let_next_kernel_start();
  }
  for (int item = run.begin; item < run.end;) {
    const int number = item / run.tiles, last = min(run.end, (number + 1) * run.tiles);
    const bool is_first = item == run.begin;
    split_operand<kN, kGateUp, kGroups * 4>(c, hits[number], order, shared + l.x, factors,
                                            reinterpret_cast<uint32_t(*)[kMostWarps]>(factors + kN), [&] {
                                              if (kGateUp && is_first) named_arrive(kBeginBarrier, kGroups * 128 + 32);
                                            });
    fence_proxy_async();
    named_sync(kMultiplyBarrier, kGroups * 128);
    const uint32_t x = descriptor_low(shared_address(shared + l.x));
    for (; item < last; ++item) {
      const int exponent = next_exponent;
      next_exponent = exponent_of(item + 1);
      float d[kN / 2] = {};
      mbarrier_wait(ring.scales_full + 8 * scales_at.stage, scales_at.parity);
      multiply_tile<kColumns>(d, first, ring, at, mine, scales + scales_at.stage * l.scale_stride, exponent, tables, x, lane);
      mbarrier_wait(ring.part_empty + 8 * part.stage, part.parity ^ 1);
      float4* parts = parts_of<S>(shared, l, part.stage, group) + (threadIdx.x & 127);
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        const float one = factors[8 * j + 2 * (lane & 3)], two = factors[8 * j + 2 * (lane & 3) + 1];
        parts[j * 128] = make_float4(d[4 * j] * one, d[4 * j + 1] * two, d[4 * j + 2] * one, d[4 * j + 3] * two);
      }
      __syncwarp();
      mbarrier_arrive_warp(ring.part_full + 8 * part.stage, lane);
      part.advance(), scales_at.advance();
      first -= kChunks % kGroups;
      if (first < 0) first += kGroups;
    }
  }
}

// What one warp adds up and writes: its half of every tile of the block.
template <bool kGateUp, class S>
__device__ __forceinline__ void finish_run(const Call& c, const RingLayout& l, uint8_t* shared, const Run& run,
                                           const int4* hits, const uint16_t* order, int finisher) {
  constexpr int kEach = 4 / kFinishers;  // warps of a warpgroup, whose rows this one has
  const int lane = threadIdx.x & 31;
  const Ring<S> ring(l, shared);
  Cursor<S::kParts> part;
  for (int item = run.begin; item < run.end; ++item, part.advance()) {
    const Tile tile = Tile::of(item, run, hits);
    const int4 hit = hits[tile.hit];
    const int exponent = tile.exponent(c, run);
    int row[kEach];
    uint32_t bias[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      row[i] = tile.number * kTileRows + Mine::row_of(finisher * kEach + i, lane);
      bias[i] = __ldg(reinterpret_cast<const uint32_t*>(c.bias + static_cast<size_t>(tile.expert) * c.rows + row[i]));
    }
    const float unit = __uint_as_float(1u << 31 | exponent << 23);  // all signs were turned
    mbarrier_wait(ring.part_full + 8 * part.stage, part.parity);
    for (int j = 0; j < S::kN / 8 && 8 * j < hit.z; ++j) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int place = j * 128 + (finisher * kEach + i) * 32 + lane;
        float4 sum = parts_of<S>(shared, l, part.stage, 0)[place];
#pragma unroll
        for (int g = 1; g < S::kGroups; ++g) {
          const float4 v = parts_of<S>(shared, l, part.stage, g)[place];
          sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        write_rows<kGateUp>(c, hit, row[i], 8 * j + 2 * (lane & 3), sum, unit, bias[i], order);
      }
    }
    __syncwarp();
    mbarrier_arrive_warp(ring.part_empty + 8 * part.stage, lane);
  }
}

// Grid: any number of blocks.
template <bool kGateUp, class S, int kColumns>
__global__ void __launch_bounds__(S::kThreads, 1)
    e4m3_kernel(const Call c, const __grid_constant__ CUtensorMap codes_map) {
  // What the block is given, 128 for each thread of four warpgroups, in other shares.
  constexpr int kMultiplyRegisters = 144, kOtherRegisters = 80;
  extern __shared__ __align__(1024) uint8_t shared[];
  const RingLayout l = e4m3_layout<S>(c);
  int4* hits = reinterpret_cast<int4*>(shared + l.hits);
  uint16_t* order = reinterpret_cast<uint16_t*>(shared + l.order);
  // Which warp this is, in a way that shows the compiler that all lanes agree: descriptors then stay in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0), group = warp >> 2;
  const Ring<S> ring(l, shared);
  store_tables(reinterpret_cast<uint2*>(shared + l.own));
  if (threadIdx.x == 0) {
    tma_prefetch_map(&codes_map);
    ring.init();
    mbarrier_init_fence();
  }
  const Run run = begin_run<kGateUp, S::kN, S::kThreads>(c, hits, reinterpret_cast<int*>(shared + l.counts), order);
  if (group == S::kGroups) {
    registers_shrink<kOtherRegisters>();
    const int role = warp & 3;
    if (role < kFinishers) {
      finish_run<kGateUp, S>(c, l, shared, run, hits, order, role);
    } else if (role == kFinishers && run.begin < run.end) {
      // Activations are asked for first, or they would wait behind all chunks that a ring holds.
      if constexpr (kGateUp) named_sync(kBeginBarrier, S::kGroups * 128 + 32);
      if ((threadIdx.x & 31) == 0) ring.template fill<kColumns>(c, codes_map, hits, run, l);
    }
  } else {
    registers_grow<kMultiplyRegisters>();
    multiply_run<kGateUp, S, kColumns>(c, l, shared, run, hits, order, group);
  }
}

}  // namespace rose::moe_decode
