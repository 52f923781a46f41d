// What the grouped FP8 products and the kernels around them share: rows of the experts and tiles of them.
#pragma once

#include "launch.cuh"
#include "mbarrier.cuh"
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

// The 4 x 4 bytes of four words, transposed: word i receives byte i of words 0..3.
__device__ __forceinline__ uint4 transpose_bytes(const uint32_t (&w)[4]) {
  uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
  uint32_t high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
  return {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632), __byte_perm(high01, high23, 0x5410),
          __byte_perm(high01, high23, 0x7632)};
}

}  // namespace rose::moe
