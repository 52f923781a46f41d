// What the grouped FP8 products share: rows of the experts, tiles of them, the SwiGLU.
#pragma once

#include <cuda_fp16.h>

#include "launch.cuh"
#include "mbarrier.cuh"
#include "prefill_ptx.cuh"
#include "tma.cuh"
#include "wgmma_fp8.cuh"

namespace rose::moe {

constexpr int kTileRows = 128;
constexpr int kBlockK = 128;
constexpr int kScaleBox = kTileRows + 4;  // a box starts at a multiple of 4 scales (16 bytes), up to 3 before the tile
constexpr int kBandTiles = 16;  // row tiles that share a run of columns before the next run: bounds L2's working set

struct Rows {
  const int* starts;  // [E + 1] first row of each expert
  const int* tiles;   // [E + 1] first tile of each expert
  const int* expert;  // [tiles] expert of each tile
  int num_experts;
};

struct Place {
  int expert, row, rows, column;  // first row and number of rows; first column
};

__device__ __forceinline__ void store_place(uint32_t at, const Place& place) {
  store_shared(at, {uint32_t(place.expert), uint32_t(place.row), uint32_t(place.rows), uint32_t(place.column)});
}

__device__ __forceinline__ Place load_place(uint32_t at) {
  uint32_t words[4];
  load_shared(words, at);
  return {int(words[0]), int(words[1]), int(words[2]), int(words[3])};
}

// Blocks of a persistent kernel: one per multiprocessor of the device in force, and no more than there are items.
// ROSE_BLOCKS (blocks.cuh) bounds them in builds for checks.
inline unsigned persistent_blocks(int64_t items) {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  processors = most_blocks(processors);
  return unsigned(items < processors ? items : processors);
}

// The item a block takes in a round. Rounds are rotated: the long and short tiles of an expert alternate, and a grid
// of even size would give one block long ones only.
__device__ __forceinline__ int item_of_round(int round) {
  const int grid = int(gridDim.x);
  return round * grid + int((blockIdx.x + 37u * unsigned(round)) % unsigned(grid));
}

// Order of the products whose operands are swapped, as in prefill_fused_plan.cuh: expert by expert; a band of tiles inside one run of rows, then the next run. An expert's
// tokens are shared out evenly over its tiles: a short tile would pay for a whole expansion.
template <int kItemRows>
__device__ __forceinline__ Place locate_even(const Rows& rows, int item, int runs) {
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

// The 4 x 4 bytes of four words, transposed: word i receives byte i of words 0..3.
__device__ __forceinline__ uint4 transpose_bytes(const uint32_t (&w)[4]) {
  uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
  uint32_t high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
  return {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632), __byte_perm(high01, high23, 0x5410),
          __byte_perm(high01, high23, 0x7632)};
}

// alpha2 = -alpha log2(e). Both approximations are within 2 units in the last place; E4M3 keeps four bits.
__device__ __forceinline__ float fast_swiglu(float gate, float up, float alpha2, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return gate * fast_reciprocal(1.f + fast_exp2(alpha2 * gate)) * (up + 1.f);
}

__device__ __forceinline__ float half_of(uint32_t packed, int half) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&packed));
  return half ? both.y : both.x;
}

}  // namespace rose::moe
