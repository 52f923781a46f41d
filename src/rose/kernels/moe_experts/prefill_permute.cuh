// Around the grouped products: give each (token, k) pair a row, quantise tokens into their rows, expand MXFP4
// weights, add the rows of a token. Row layout as in triton_permute.py: expert by expert, in the order of the
// pairs, without padding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "wgmma_fp8.cuh"

namespace rose::moe {

constexpr int kSortWarps = 32;
constexpr int kMaxExperts = 128;

// One block. Each warp owns a run of pairs in order: it counts its experts, the counts are summed over warps and
// experts, and the warp walks its run again to hand out rows. Ties keep the order of the pairs.
__global__ void __launch_bounds__(kSortWarps * 32) sort_pairs(const int* ids, int num_pairs, int num_experts,
                                                               int tile_rows, int* row_of_pair, int* starts,
                                                               int* tiles, int* expert_of_tile, int* pairs) {
  __shared__ int next[kSortWarps][kMaxExperts];
  __shared__ int totals[kMaxExperts], tile_starts[kMaxExperts];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int e = lane; e < kMaxExperts; e += 32) next[warp][e] = 0;
  __syncwarp();
  const int rounds = (num_pairs + kSortWarps * 32 - 1) / (kSortWarps * 32);
  const int begin = warp * rounds * 32;
#pragma unroll 4
  for (int i = 0; i < rounds; ++i) {
    const int pair = begin + i * 32 + lane;
    const int id = pair < num_pairs ? __ldg(ids + pair) : -1;
    if (id >= 0) atomicAdd(&next[warp][id], 1);
  }
  __syncthreads();
  if (threadIdx.x < kMaxExperts) {
    int sum = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = next[w][threadIdx.x];
      next[w][threadIdx.x] = sum;
      sum += count;
    }
    totals[threadIdx.x] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    // Four experts a lane: rows and tiles before each.
    int rows[4], tile_counts[4], pair_counts[4], row_sum = 0, tile_sum = 0, pair_sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = row_sum;
      tile_counts[i] = tile_sum;
      pair_counts[i] = pair_sum;
      const int total = totals[4 * lane + i], count = (total + tile_rows - 1) / tile_rows;
      row_sum += total;
      tile_sum += count;
      pair_sum += count / 2;
    }
    int row_end = row_sum, tile_end = tile_sum, pair_end = pair_sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int row_before = __shfl_up_sync(0xffffffffu, row_end, step);
      const int tile_before = __shfl_up_sync(0xffffffffu, tile_end, step);
      const int pair_before = __shfl_up_sync(0xffffffffu, pair_end, step);
      if (lane >= step) {
        row_end += row_before;
        tile_end += tile_before;
        pair_end += pair_before;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = 4 * lane + i;
      const int row = row_end - row_sum + rows[i], tile = tile_end - tile_sum + tile_counts[i];
      tile_starts[e] = tile;
      // Experts past the last one hold no rows: entry `num_experts` is the total.
      if (e <= num_experts) {
        starts[e] = row;
        tiles[e] = tile;
        pairs[e] = pair_end - pair_sum + pair_counts[i];
      }
      if (e == kMaxExperts - 1 && num_experts == kMaxExperts) {
        starts[num_experts] = row_end;
        tiles[num_experts] = tile_end;
        pairs[num_experts] = pair_end;
      }
      totals[e] = row;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x / 8; e < num_experts; e += kSortWarps * 4) {
    const int last = e + 1 < kMaxExperts ? tile_starts[e + 1] : tiles[num_experts];
    for (int t = tile_starts[e] + threadIdx.x % 8; t < last; t += 8) expert_of_tile[t] = e;
  }
  for (int e = lane; e < kMaxExperts; e += 32) next[warp][e] += totals[e];
  __syncwarp();
  constexpr int kAhead = 4;  // loads in flight; the rounds themselves depend on each other
  for (int i = 0; i < rounds; i += kAhead) {
    int id[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int pair = begin + (i + j) * 32 + lane;
      id[j] = i + j < rounds && pair < num_pairs ? __ldg(ids + pair) : -1;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int pair = begin + (i + j) * 32 + lane;
      const uint32_t same = __match_any_sync(0xffffffffu, id[j]);
      const int before = __popc(same & ((1u << lane) - 1));
      const int base = id[j] >= 0 ? next[warp][id[j]] : 0;
      __syncwarp();
      if (id[j] >= 0 && before == 0) next[warp][id[j]] = base + __popc(same);
      __syncwarp();
      if (i + j < rounds && pair < num_pairs) row_of_pair[pair] = id[j] >= 0 ? base + before : -1;
    }
  }
}

// One block per token, 16 lanes per group of 128 columns: quantised once, written to each of its rows.
template <int kChosenMax>
__global__ void quantize_rows(const __nv_bfloat16* x, const int* row_of_pair, uint8_t* values, float* scales,
                              int columns, int chosen, int scales_stride) {
  const int64_t token = blockIdx.x;
  const int part = threadIdx.x % 16;
  int rows[kChosenMax];
#pragma unroll
  for (int k = 0; k < kChosenMax; ++k) rows[k] = k < chosen ? __ldg(row_of_pair + token * chosen + k) : -1;
  for (int group = threadIdx.x / 16; group * 128 < columns; group += blockDim.x / 16) {
    const int column = group * 128 + part * 8;
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (column < columns) raw = __ldg(reinterpret_cast<const uint4*>(x + token * columns + column));
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float v[8], amax = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      amax = fmaxf(amax, fmaxf(fabsf(v[2 * i]), fabsf(v[2 * i + 1])));
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffu << (threadIdx.x & 16), amax, step, 16));
    }
    const float scale = fmaxf(amax, 1e-4f) / 448.f;
    uint2 packed;
    packed.x = pack_e4m3(v[0] / scale, v[1] / scale, v[2] / scale, v[3] / scale);
    packed.y = pack_e4m3(v[4] / scale, v[5] / scale, v[6] / scale, v[7] / scale);
#pragma unroll
    for (int k = 0; k < kChosenMax; ++k) {
      if (rows[k] < 0) continue;
      if (column < columns) *reinterpret_cast<uint2*>(values + int64_t(rows[k]) * columns + column) = packed;
      if (part == k) scales[int64_t(group) * scales_stride + rows[k]] = scale;
    }
  }
}

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
    if (row >= 0) raw[k] = __ldg(reinterpret_cast<const uint4*>(y + int64_t(row) * columns + column));
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

// PRMT as it is: nvcc clears the top bit of each selector of __byte_perm, the one that replicates a byte's sign.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selectors));
  return out;
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
