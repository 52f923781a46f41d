// MXFP4 to E4M3 in registers: the eight magnitudes of a code with its block's scale, looked up by byte permutation.
// A tile's exponent is 6 below that of its highest scale (e4m3_weights.py), so that 6 x 2^6 fits. Blocks whose scale is at
// most 2^14 below the highest are exact, others go to the nearest E4M3 number.
#pragma once

#include "decode_e4m3_ptx.cuh"
#include "permute_ptx.cuh"

namespace rose::moe_decode {

using moe::permute_bytes;

constexpr int kLowestShift = -14, kHighestShift = 6;  // below, every code rounds to zero; above, nothing is
constexpr int kTables = 32;           // the last ones are zeros, for what is below and above
constexpr uint32_t kForties = 0x40404040u;
constexpr int kTableBytes = kTables * 8 + 16;  // with a word of kForties behind them

// By the first threads of a block.
__device__ __forceinline__ void store_tables(uint2* tables) {
  const int shift = static_cast<int>(threadIdx.x) + kLowestShift;
  if (threadIdx.x >= kTables) return;
  const float unit = shift <= kHighestShift ? __uint_as_float((127 + shift) << 23) : 0.0f;
  uint2 table;
  table.x = to_e4m3(0.0f, 0.5f * unit) | to_e4m3(unit, 1.5f * unit) << 16;
  table.y = to_e4m3(2 * unit, 3 * unit) | to_e4m3(4 * unit, 6 * unit) << 16;
  tables[threadIdx.x] = table;
  if (threadIdx.x == 0) tables[kTables].x = kForties;
}

// The table of a block with this scale, in a tile with this exponent, both biased by 127.
__device__ __forceinline__ uint32_t table_of(uint32_t scale, int exponent) {
  const uint32_t place = scale + static_cast<uint32_t>(-kLowestShift - exponent);
  return place < kTables ? place : kTables - 1;
}

// Eight codes to two words of E4M3, all signs turned: a positive code has bit 7, a negative one has not. A selector with
// its top bit set gives the sign of 0x40, nothing, and else 0x40 itself. `forties`: kForties from memory, for
// what the compiler knows it moves to a register anew for every word.
__device__ __forceinline__ void expand_word(uint32_t codes, const uint2& table, uint32_t forties, uint32_t& first,
                                            uint32_t& second) {
  const uint32_t magnitudes = codes & 0x77777777u;
  first = permute_bytes(table.x, table.y, magnitudes) + 2 * permute_bytes(forties, forties, codes);
  second = permute_bytes(table.x, table.y, magnitudes >> 16) + 2 * permute_bytes(forties, forties, codes >> 16);
}

}  // namespace rose::moe_decode
