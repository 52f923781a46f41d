// Products of one item of the ring: a warp's share of its columns, for all rows.
//
// Weights are operand A of mma.m16n8k16 (16 rows), activations are operand B (8 columns); columns inside a product may
// come in any order, as long as both operands have the same one. One column would do for one token. So the others take
// what has other activations: the quarters of rows of bf16, each with its quarter of the token, and the tile of another
// expert, with that expert's token. Of a row's products with all columns, the one with its own counts.
//
// A warp's part of an item has 16 numbers, one for each row (of both tiles).
#pragma once

#include "layers_plan.cuh"
#include "layers_ptx.cuh"

namespace rose::layers {

using moe_decode::mma;
using moe_decode::unpack_e2m1;
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

// Two tiles of mxfp4. Row g of the product is of the first, row g + 8 of the second; even columns are the activations of
// the first, odd ones of the second. `token`: those of this lane's column.
template <int kColumns, int kTeamWarps>
__device__ __forceinline__ void multiply_tiles(float (&acc)[4], const uint8_t* stage, const uint8_t* token, int warp) {
  constexpr int kBlocks = kColumns / 32;
  constexpr int kTileCodes = kTileRows * kColumns / 2, kTileScales = kTileRows * kBlocks;
  const int lane = threadIdx.x & 31, t = lane & 3, row = tile_row(lane >> 2), turn = (t >> 1) & 1;
  const uint8_t* codes = stage + row * (kColumns / 2);
  const uint8_t* scales = stage + 2 * kTileCodes + row * kBlocks;
  float more[4] = {};
  // Steps are no straight line of code: every phase begins with instructions that have to be fetched.
#pragma unroll 1
  for (int s = warp; 4 * s < kBlocks; s += kTeamWarps) {
    const int block = 4 * s + t, place = min(block, kBlocks - 1);
    const uint4 low = *reinterpret_cast<const uint4*>(codes + place * 16);
    const uint4 high = *reinterpret_cast<const uint4*>(codes + kTileCodes + place * 16);
    // Past the last block: its codes once more, times zero.
    const uint32_t scale_low = block < kBlocks ? scales[place] * 0x800080u + 0x1F001F00u : 0;
    const uint32_t scale_high = block < kBlocks ? scales[kTileScales + place] * 0x800080u + 0x1F001F00u : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t a[4], b[4];
      unpack_e2m1(word(low, i), scale_low, a);
      unpack_e2m1(word(high, i), scale_high, b);
      const uint4 x = *reinterpret_cast<const uint4*>(token + place * 64 + ((i ^ turn) * 16));
      mma(acc, a[0], b[0], a[1], b[1], x.x, x.y);
      mma(more, a[2], b[2], a[3], b[3], x.z, x.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] += more[i];
}

__device__ __forceinline__ void put_tiles(float* parts, const float (&acc)[4]) {
  const int lane = threadIdx.x & 31, row = tile_row(lane >> 2);
  if ((lane & 3) == 0) parts[row] = acc[0], parts[kTileRows + row] = acc[3];
}

// Eight bf16 in the order that unpacked codes have: pairs (0, 4), (1, 5), (2, 6), (3, 7).
__device__ __forceinline__ uint4 four_bit_order(const uint4& v) {
  uint4 w;
  w.x = __byte_perm(v.x, v.z, 0x5410), w.y = __byte_perm(v.x, v.z, 0x7632);
  w.z = __byte_perm(v.y, v.w, 0x5410), w.w = __byte_perm(v.y, v.w, 0x7632);
  return w;
}

// Where chunk `i` (8 columns) of a row lies beside mxfp4: lanes 2 and 3 of a quad read theirs the other way round.
__device__ __forceinline__ int four_bit_place(int i) { return (i ^ ((i >> 3) & 1)) * 16; }

}  // namespace rose::layers
