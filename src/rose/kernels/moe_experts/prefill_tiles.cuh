// What the grouped FP8 products and the kernels around them share: rows of the experts, the ring of stages, transposes
// inside a quad.
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

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Four words of each of four lanes that lie `step` apart, transposed: lane q of them receives word q of lanes 0..3.
__device__ __forceinline__ void transpose_lanes(uint32_t (&w)[4], int q, int step) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t got = __shfl_xor_sync(0xffffffffu, (q & 1) ? w[i] : w[i + 1], step);
    if (q & 1) w[i] = got;
    else w[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t got = __shfl_xor_sync(0xffffffffu, (q & 2) ? w[i] : w[i + 2], 2 * step);
    if (q & 2) w[i] = got;
    else w[i + 2] = got;
  }
}

__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int q) { transpose_lanes(w, q, 1); }

// The 4 x 4 bytes of four words, transposed: word i receives byte i of words 0..3.
__device__ __forceinline__ uint4 transpose_bytes(const uint32_t (&w)[4]) {
  uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
  uint32_t high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
  return {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632), __byte_perm(high01, high23, 0x5410),
          __byte_perm(high01, high23, 0x7632)};
}

__device__ __forceinline__ float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

}  // namespace rose::moe
