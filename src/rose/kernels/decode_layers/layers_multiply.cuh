// Products of one item of the ring: a warp's share of its columns, for all rows.
//
// Weights are operand A, activations are operand B; columns inside a product may come in any order, as long as both
// operands have the same one. One column of B would do for one token. So the others take what has other activations: the
// quarters of rows of bf16, each with its quarter of the token (mma.m16n8k16); of mxfp4 the parts of the token in which
// four warps multiply, and the token of the tile of another expert (wgmma.m64n16k32). Of a row's products with all
// columns, those with its own count.
//
// A warp's part of an item has 16 numbers, one for each row (of both tiles).
#pragma once

#include "../moe_experts/decode_e4m3_ptx.cuh"
#include "../moe_experts/permute_ptx.cuh"
#include "layers_block.cuh"
#include "wgmma_fp8_registers.cuh"

namespace rose::layers {

using moe::permute_bytes;
using moe_decode::mma;
using moe_decode::multiply;
using moe_decode::to_e4m3;
using moe_decode::word;

// A warp's columns of rows of bf16, `kColumns` * 2 + kPad bytes apart. Row 4 q + r of the product is quarter q of row r,
// column q that quarter of the token; columns 4 to 7 have them once more.
template <int kColumns, int kTeamWarps>
struct RowProduct {
  static constexpr int kRow = kColumns * 2 + kPad, kAll = kColumns / 32, kQuarter = (kAll + 3) / 4;
  static constexpr int kSteps = (kQuarter + kTeamWarps - 1) / kTeamWarps;
  static constexpr bool kIsEven = kAll % 4 == 0;
  static_assert(kAll > 2 * kQuarter);

  uint4 x[kSteps];  // the token's columns of this lane, the same for all items of a phase

  // The last quarters may be shorter.
  __device__ static bool is_in(int quarter, int s) {
    return s < kQuarter && (kIsEven || quarter * kQuarter + s < kAll);
  }

  __device__ static RowProduct of(const uint8_t* activations, int warp) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const uint8_t* token = activations + (g & 3) * kQuarter * 64 + (lane & 3) * 16;
    RowProduct product;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int s = warp + i * kTeamWarps;
      product.x[i] = is_in(g & 3, s) ? *reinterpret_cast<const uint4*>(token + s * 64) : uint4{};
    }
    return product;
  }

  // The part of row (lane / 4) % 4.
  template <int kRows>
  __device__ float multiply(const uint8_t* stage, int warp) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, q = g >> 2;
    const uint8_t* row = stage + min(g & 3, kRows - 1) * kRow + q * kQuarter * 64 + t * 16;
    uint4 low[kSteps] = {}, high[kSteps] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int s = warp + i * kTeamWarps;
      if (is_in(q, s)) low[i] = *reinterpret_cast<const uint4*>(row + s * 64);
      if (is_in(q + 2, s)) high[i] = *reinterpret_cast<const uint4*>(row + (2 * kQuarter + s) * 64);
    }
    float acc[4] = {}, more[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      mma(acc, low[i].x, high[i].x, low[i].y, high[i].y, x[i].x, x[i].y);
      mma(more, low[i].z, high[i].z, low[i].w, high[i].w, x[i].z, x[i].w);
    }
    // Row g has quarter q in column q, row g + 8 has quarter q + 2: lanes 0 and 1 of each four.
    const float even = q == 0 ? acc[0] + more[0] : acc[1] + more[1];
    const float odd = q == 0 ? acc[2] + more[2] : acc[3] + more[3];
    float sum = t & 1 ? odd : even;
    sum += shuffle_xor(sum, 1);
    return sum + shuffle_xor(sum, 16);
  }
};

__device__ __forceinline__ void put_rows(float* parts, float sum) {
  const int lane = threadIdx.x & 31;
  if ((lane & 19) == 0) parts[lane >> 2] = sum;
}

// Activations beside mxfp4: a number times a power of two of its token is the sum of two E4M3 numbers, which are operand
// B. 128 columns are a group, four groups an atom: eight rows of 128 bytes, 128-byte swizzle. Row 2q + p of it is part p
// (the rounded number, the rest) of group q; its byte 32v + 16u + 4t + b is column 32t + 8v + 4u + b of the group, as a
// thread that takes the codes of block t as they lie has them in product v.
//
// A token's power of two brings its largest number between 2^7 and 2^8; `factor` takes it back from sums of weights that
// are 2^kTop times as large. Infinity and NaN pass on.
constexpr int kTop = 6;  // of the largest block: 6 * 2^6 is below 448

struct TokenScale {
  uint32_t scale;  // a pair of bf16
  float factor;

  // `largest`: the magnitude of a bf16, its bits.
  __device__ explicit TokenScale(uint32_t largest) {
    // Powers of two stay within those of float32.
    const int shift = min(max(7 + 127 - static_cast<int>(largest >> 7), -119), 120);
    scale = (127 + shift) * 0x800080u;
    factor = largest >= 0x7F80 ? __uint_as_float(0x7FC00000u) : __uint_as_float((127 - kTop - shift) << 23);
  }
};

// Chunk `number` (eight columns) of the tokens, to `tokens`. fence_proxy_async and a barrier follow.
__device__ __forceinline__ void put_split(uint8_t* tokens, int number, const uint4& x, uint32_t scale) {
  const int q = number / 16 % 4, t = number / 4 % 4, v = number % 4;
  // Of part p and half u the row is 2q + p, and 16 bytes 2v + u of it lie where (2v + u) ^ row says.
  uint8_t* to = tokens + number / 64 * 1024 + q * 256 + (v ^ q) * 32 + 4 * t;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const uint32_t a = multiply(word(x, 2 * u), scale), b = multiply(word(x, 2 * u + 1), scale);
    const Split first = split_e4m3(low(a), high(a)), second = split_e4m3(low(b), high(b));
    *reinterpret_cast<uint32_t*>(to + u * 16) = first.nearest | second.nearest << 16;
    *reinterpret_cast<uint32_t*>(to + 128 + (1 - u) * 16) = first.rest | second.rest << 16;
  }
}

// Eight codes to two words of E4M3. A selector with its top bit set, as a negative code has it, gives the sign of a byte,
// and no byte of the tables has one. So the first half of `table` gives the positive numbers, and nothing elsewhere. The
// second, its last byte first, is asked with the complement, and gives half of the bytes of the negative numbers. The
// integer unit is the one that is full: complement and sum are multiply-adds.
__device__ __forceinline__ void expand_word(uint32_t codes, const uint4& table, uint32_t ones, uint32_t& first,
                                            uint32_t& second) {
  const uint32_t upper = codes >> 16;
  first = permute_bytes(table.x, table.y, codes) + 2 * permute_bytes(table.z, table.w, codes * ones + ones);
  second = permute_bytes(table.x, table.y, upper) + 2 * permute_bytes(table.z, table.w, upper * ones + ones);
}

// By the first threads of a block. Bytes are even, so that they have halves.
__device__ __forceinline__ void store_tables(Tables& tables) {
  if (threadIdx.x >= kTables) return;
  const float unit = __uint_as_float((127 + kTop - threadIdx.x) << 23);
  auto pack = [&](float a, float b, float c, float d) {
    return (to_e4m3(a * unit, b * unit) | to_e4m3(c * unit, d * unit) << 16) & 0xFEFEFEFEu;
  };
  if (threadIdx.x == 0) tables.ones = ~0u;
  tables.bytes[threadIdx.x] = {pack(0, 0.5f, 1, 1.5f), pack(2, 3, 4, 6), pack(6, 4, 3, 2) / 2 | 0x40404040u,
                               pack(1.5f, 1, 0.5f, 0) / 2 | 0x40404040u};
}

// A warp's share of two tiles of mxfp4: a group of columns in each step, the four warps of a warpgroup those of an atom.
// To wgmma these are 64 rows, to us 16 rows four times: of the products with all groups of the atom only those with the
// warp's own count. Row g is of the first tile, row g + 8 of the second.
//
// A row's blocks in the share have scales 2^-d of the largest among them, and become E4M3 by table d: exact up to 13, cut
// to multiples of 2^-14 of the largest scale beyond. Sums stay in the tensor core, which cuts each addition to some 14
// bits; but these are few (4 * kSteps), and the parts of all warps are added in float32.
//
// Steps are a straight line of code, so that the codes of one are taken apart while the products of another run, and
// descriptors stay in uniform registers.
template <class P, int kColumns>
struct TileProduct {
  static constexpr int kBlocks = kColumns / 32, kSteps = P::padded(kColumns) / (P::kTeamWarps * kGroupColumns);
  static constexpr int kTileCodes = kTileRows * kColumns / 2, kTileScales = kTileRows * kBlocks;
  static constexpr int kStepCodes = P::kTeamWarps * kGroupColumns / 2;  // bytes of a row

  float low, high;  // this lane's rows, if it has a column of the warp's group

  // `tokens`: address of the first tile's token, behind it another, which is the second tile's if `are_two`; `factors`:
  // of these tokens.
  __device__ TileProduct(const uint8_t* stage, const Tables& tables, uint32_t tokens, const float* factors, bool are_two,
                         int warp) {
    const int lane = threadIdx.x & 31, t = lane & 3, row = tile_row(lane >> 2);
    const uint8_t* codes = stage + row * (kColumns / 2) + (4 * warp + t) * 16;
    const uint8_t* scales = stage + 2 * kTileCodes + row * kBlocks;
    uint32_t exponents[kSteps], largest = 0;  // of both rows
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int block = min(4 * (warp + i * P::kTeamWarps) + t, kBlocks - 1);
      exponents[i] = scales[block] + scales[kTileScales + block] * 0x10000u;
      largest = larger_halves(largest, exponents[i]);
    }
    largest = larger_halves(largest, shuffle_xor(largest, 1));
    largest = larger_halves(largest, shuffle_xor(largest, 2));
    const uint32_t ones = tables.ones;
    // In a way that shows the compiler that all lanes agree.
    const uint32_t place = __shfl_sync(~0u, descriptor_low(tokens + warp / 4 * 1024), 0);
    float d[8] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t below = smaller_halves(largest - exponents[step], (kTables - 1) * 0x10001u);
      const uint4 table_low = tables.bytes[below & 0xFFFF], table_high = tables.bytes[below >> 16];
      // Past the last block: whatever lies there, times zero.
      const uint4 codes_low = *reinterpret_cast<const uint4*>(codes + step * kStepCodes);
      const uint4 codes_high = *reinterpret_cast<const uint4*>(codes + kTileCodes + step * kStepCodes);
      uint32_t a[4][4];
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        expand_word(word(codes_low, v), table_low, ones, a[v][0], a[v][2]);
        expand_word(word(codes_high, v), table_high, ones, a[v][1], a[v][3]);
      }
      wgmma_fence();
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        // Sixteen columns: eight of an atom, eight of that of the other token.
        wgmma_e4m3<16>(d, a[v], whole_descriptor<2 * P::padded(kColumns)>(place + step * kStepCodes / 4 + 2 * v), 1);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the registers of the step before are free for the codes of the next
    }
    wgmma_wait<0>();
    settle(d);
    // Both parts of the token.
    low = (d[0] + d[1]) * factors[0] * __uint_as_float(largest << 23);
    high = (are_two ? d[6] + d[7] : d[2] + d[3]) * factors[are_two] * __uint_as_float(largest >> 16 << 23);
  }

  __device__ void put(float* parts, int warp) const {
    const int lane = threadIdx.x & 31, row = tile_row(lane >> 2);
    if ((lane & 3) == (warp & 3)) parts[row] = low, parts[kTileRows + row] = high;
  }
};

}  // namespace rose::layers
