// Before the grouped products: give each (token, k) pair a row, by a cluster of eight blocks; quantise tokens into their
// rows, sixteen columns a lane.
#pragma once

#include "mbarrier.cuh"
#include "prefill_permute.cuh"
#include "warp.cuh"

namespace rose::moe {

constexpr int kSortBlocks = 8;  // the largest portable cluster

__device__ __forceinline__ int load_remote(const int* pointer, uint32_t rank) {
  int value;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.b32 %0, [there];\n}"
      : "=r"(value)
      : "r"(shared_address(pointer)), "r"(rank)
      : "memory");
  return value;
}

// Each warp of the cluster owns a run of pairs in order: it counts its experts, learns how many rows of each lie before its
// own, in its block and in the others, and walks its run again to hand out rows. Ties keep the order of the pairs.
__global__ void __cluster_dims__(kSortBlocks, 1, 1) __launch_bounds__(kSortWarps * 32)
    sort_pairs_in_cluster(const int* ids, int num_pairs, int num_experts, int tile_rows, int* row_of_pair, int* starts,
                          int* tiles, int* expert_of_tile) {
  __shared__ int next[kSortWarps][kMaxExperts];
  __shared__ int counts[kMaxExperts], before[kMaxExperts], firsts[kMaxExperts], tile_starts[kMaxExperts + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t rank = cluster_rank();
  for (int e = lane; e < kMaxExperts; e += 32) next[warp][e] = 0;
  __syncwarp();
  const int rounds = (num_pairs + kSortBlocks * kSortWarps * 32 - 1) / (kSortBlocks * kSortWarps * 32);
  const int begin = (int(rank) * kSortWarps + warp) * rounds * 32;
#pragma unroll 4
  for (int i = 0; i < rounds; ++i) {
    const int pair = begin + i * 32 + lane;
    const int id = pair < num_pairs ? __ldg(ids + pair) : -1;
    if (id >= 0) atomicAdd(&next[warp][id], 1);
  }
  __syncthreads();
  if (threadIdx.x < kMaxExperts) {
    int sum = 0;
#pragma unroll 8
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = next[w][threadIdx.x];
      next[w][threadIdx.x] = sum;
      sum += count;
    }
    counts[threadIdx.x] = sum;
  }
  cluster_sync();
  if (threadIdx.x < kMaxExperts) {
    int sum = 0, mine = 0;
#pragma unroll
    for (uint32_t r = 0; r < kSortBlocks; ++r) {
      if (r == rank) mine = sum;
      sum += load_remote(counts + threadIdx.x, r);
    }
    before[threadIdx.x] = mine;
    firsts[threadIdx.x] = sum;  // rows of the expert, until warp 0 turns them into its first row
  }
  __syncthreads();
  if (warp == 0) {
    // Four experts a lane: rows and tiles before each.
    int rows[4], tile_counts[4], row_sum = 0, tile_sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = row_sum;
      tile_counts[i] = tile_sum;
      const int total = firsts[4 * lane + i];
      row_sum += total;
      tile_sum += (total + tile_rows - 1) / tile_rows;
    }
    int row_end = row_sum, tile_end = tile_sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int row_before = __shfl_up_sync(0xffffffffu, row_end, step);
      const int tile_before = __shfl_up_sync(0xffffffffu, tile_end, step);
      if (lane >= step) {
        row_end += row_before;
        tile_end += tile_before;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = 4 * lane + i;
      const int row = row_end - row_sum + rows[i], tile = tile_end - tile_sum + tile_counts[i];
      tile_starts[e] = tile;
      firsts[e] = row;
      if (rank == 0 && e <= num_experts) {
        starts[e] = row;
        tiles[e] = tile;
      }
      if (e == kMaxExperts - 1) {
        tile_starts[kMaxExperts] = tile_end;
        if (rank == 0 && num_experts == kMaxExperts) {
          starts[num_experts] = row_end;
          tiles[num_experts] = tile_end;
        }
      }
    }
  }
  __syncthreads();
  for (int e = int(rank) * kSortWarps + warp; e < num_experts; e += kSortBlocks * kSortWarps) {
    for (int t = tile_starts[e] + lane; t < tile_starts[e + 1]; t += 32) expert_of_tile[t] = e;
  }
  for (int e = lane; e < kMaxExperts; e += 32) next[warp][e] += firsts[e] + before[e];
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
      const int earlier = __popc(same & ((1u << lane) - 1));
      const int base = id[j] >= 0 ? next[warp][id[j]] : 0;
      __syncwarp();
      if (id[j] >= 0 && earlier == 0) next[warp][id[j]] = base + __popc(same);
      __syncwarp();
      if (i + j < rounds && pair < num_pairs) row_of_pair[pair] = id[j] >= 0 ? base + earlier : -1;
    }
  }
  cluster_sync();  // until here another block may read this one's counts
}

// One block per token, 8 lanes per group of 128 columns, 16 columns a lane: quantised once, written to each row. The last
// tokens first: the router has read them last, so that they are what the L2 cache holds of x.
// kTurned: in the order that prefill_swapped.cuh reads, a transpose of 8 x 4 words of a group (4 x 4 of half a group).
template <int kChosenMax, bool kTurned = false>
__global__ void quantize_wide(const __nv_bfloat16* x, const int* row_of_pair, uint8_t* values, float* scales,
                              int columns, int chosen, int scales_stride) {
  const int64_t token = gridDim.x - 1 - blockIdx.x;
  const int part = threadIdx.x % 8, group = threadIdx.x / 8;
  const int column = threadIdx.x * 16;
  uint4 raw[2] = {};
  if (column < columns) {
    const uint4* from = reinterpret_cast<const uint4*>(x + token * columns + column);
    raw[0] = __ldcs(from);
    raw[1] = __ldcs(from + 1);
  }
  int rows[kChosenMax];
#pragma unroll
  for (int k = 0; k < kChosenMax; ++k) rows[k] = k < chosen ? __ldg(row_of_pair + token * chosen + k) : -1;
  const uint32_t words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
  float v[16], amax = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    amax = fmaxf(amax, fmaxf(fabsf(v[2 * i]), fabsf(v[2 * i + 1])));
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  const float scale = fmaxf(amax, 1e-4f) / 448.f, inverse = 1.f / scale;
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    packed[i] = pack_e4m3(v[4 * i] * inverse, v[4 * i + 1] * inverse, v[4 * i + 2] * inverse, v[4 * i + 3] * inverse);
  }
  const bool is_in = column < columns, has_group = group * 128 < columns;
  int place = column;
  if constexpr (kTurned) {
    const bool is_half = group * 128 + 64 == columns;
    const int turn = is_half ? part % 4 : part / 2;
    transpose_lanes(packed, turn, is_half ? 1 : 2);
    place = group * 128 + 16 * (is_half ? part : 4 * (part % 2) + turn);
  }
#pragma unroll
  for (int k = 0; k < kChosenMax; ++k) {
    if (rows[k] < 0) continue;
    if (is_in) {
      *reinterpret_cast<uint4*>(values + int64_t(rows[k]) * columns + place) =
          make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
    if (has_group && part == k % 8) scales[int64_t(group) * scales_stride + rows[k]] = scale;
  }
}

}  // namespace rose::moe
