// Around the grouped products: expand MXFP4 weights in memory, add the rows of a token; prefill_rows.cuh sorts and
// quantises. Row layout as in triton_permute.py: expert by expert, in the order of the pairs, without padding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "permute_ptx.cuh"
#include "wgmma_fp8.cuh"

namespace rose::moe {

constexpr int kSortWarps = 32;
constexpr int kMaxExperts = 128;

// One thread per eight columns of a token; k = 0 first, float32, one rounding.
template <int kChosenMax>
__global__ void combine_rows(const __nv_bfloat16* y, const int* row_of_pair, const __nv_bfloat16* weights,
                             __nv_bfloat16* out, int64_t num_vectors, int columns, int chosen) {
  const int64_t vector = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (vector >= num_vectors) return;
  const int per_row = columns / 8;
  const int64_t token = vector / per_row;
  const int column = int(vector - token * per_row) * 8;
  uint4 raw[kChosenMax];
  float weight[kChosenMax];
#pragma unroll
  for (int k = 0; k < kChosenMax; ++k) {
    const int row = k < chosen ? __ldg(row_of_pair + token * chosen + k) : -1;
    weight[k] = k < chosen ? __bfloat162float(weights[token * chosen + k]) : 0.f;
    raw[k] = make_uint4(0, 0, 0, 0);
    // Read for the last time: the L2 cache is to keep the sums, which the next norm reads from their end.
    if (row >= 0) raw[k] = __ldcs(reinterpret_cast<const uint4*>(y + int64_t(row) * columns + column));
  }
  float total[8] = {};
#pragma unroll
  for (int k = 0; k < kChosenMax; ++k) {
    const uint32_t words[4] = {raw[k].x, raw[k].y, raw[k].z, raw[k].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[2 * i] += weight[k] * __uint_as_float(words[i] << 16);
      total[2 * i + 1] += weight[k] * __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  uint4 packed = {pack_bf16(total[0], total[1]), pack_bf16(total[2], total[3]), pack_bf16(total[4], total[5]),
                  pack_bf16(total[6], total[7])};
  *reinterpret_cast<uint4*>(out + token * columns + column) = packed;
}

// MXFP4 to E4M3: sixteen codes a thread. The eight magnitudes of a block are brought to the tile's scale once
// (exact where the exponents of a tile span at most 14, nearest even beyond) and looked up by byte permutation.
__global__ void expand_mxfp4(const uint2* codes, const uint8_t* exponents, const int* tile_exponents, uint4* values,
                             int64_t num_threads, int rows, int columns) {
  const int64_t index = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (index >= num_threads) return;
  const int per_row = columns / 16;
  const int64_t row = index / per_row;
  const int column = int(index - row * per_row) * 16;
  const int64_t expert = row / rows;
  const int tile_row = int(row - expert * rows) / 128;
  const int tile_rows = (rows + 127) / 128, tile_columns = (columns + 127) / 128;
  const int tile = __ldg(tile_exponents + (expert * tile_rows + tile_row) * tile_columns + column / 128);
  // 2^-40 rounds every code to zero. More than 2^9 meets no nonzero code, because the tile's amax is under 512 units.
  const int shift = max(min(int(__ldg(exponents + index / 2)) - tile, 9), -40);
  const float unit = __uint_as_float(uint32_t(shift + 127) << 23);
  const uint32_t low = pack_e4m3(0.f, 0.5f * unit, unit, 1.5f * unit);
  const uint32_t high = pack_e4m3(2.f * unit, 3.f * unit, 4.f * unit, 6.f * unit);
  const uint2 packed = __ldg(codes + index);
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = (i < 2 ? packed.x : packed.y) >> (16 * (i & 1));
    // A selector's top bit replicates a byte's sign: 0x80 stays 0x80 without it, becomes 0xff with it.
    const uint32_t sign = (permute_bytes(0x80808080u, 0x80808080u, word & 0xffffu) << 1) & 0x80808080u;
    out[i] = permute_bytes(low, high, word & 0x7777u) | sign;
  }
  values[index] = make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace rose::moe
