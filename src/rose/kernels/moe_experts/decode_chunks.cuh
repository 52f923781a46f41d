// What decode experts share whose codes pass through rings of chunks (decode_e4m3.cuh): where things lie in shared
// memory, which tiles a block has, who asks for the next chunk and when.
//
// A tile is 64 rows of one expert's matrix. Tiles are dealt out to blocks in contiguous runs; warpgroups of a block take
// turns at the tiles of a run, which share the activations. Each warpgroup has a ring of its own, of chunks of 64 rows by
// 256 columns (128 bytes of codes, swizzled), which the tensor copy engine fills ahead across tiles and across experts.
// A chunk is given back once its codes are in registers. A tile's scales come with its first chunk.
#pragma once

#include "decode_call.cuh"
#include "decode_chunks_ptx.cuh"
#include "mbarrier.cuh"
#include "wgmma.cuh"

namespace rose::moe_decode {

constexpr int kTileRows = 64;
constexpr int kChunkBytes = kTileRows * 128;

struct RingLayout {
  int x, scale_bytes, scales, barriers, own, counts, hits, order, total;

  // own_bytes: at `own`, of what only this kernel has.
  template <int kN, int kGroups, int kStages>
  __host__ __device__ static RingLayout make(const Call& c, int own_bytes = 0) {
    RingLayout l;
    l.x = kGroups * kStages * kChunkBytes;
    l.scale_bytes = kTileRows * (c.columns / 32);
    l.scales = l.x + (c.columns + 127) / 128 * kN * 256;
    l.barriers = l.scales + 2 * kGroups * l.scale_bytes;
    l.own = l.barriers + (kGroups * kStages * 8 + 15) / 16 * 16;
    l.hits = l.own + (own_bytes + 15) / 16 * 16;
    int most = (c.pairs < c.experts ? c.pairs : c.experts) + c.pairs / kN + 1;
    l.counts = l.hits + most * 16;
    l.order = l.counts + (c.experts + 1) * 4;
    l.total = l.order + c.pairs * 4;
    return l;
  }
};

// A block's share of all tiles: numbers of them, hit by hit.
struct Run {
  int tiles;  // of a hit
  int begin, end;
};

// The warpgroup's barriers, the lists of hits, and this block's run. Kernels of gate_up wait for the router first.
template <bool kGateUp, int kN, int kGroups, int kStages>
__device__ __forceinline__ Run begin_rings(const Call& c, uint32_t full, int4* hits, int* counts, uint16_t* order) {
  if ((threadIdx.x & 127) == 0) {
    for (int s = 0; s < kStages; ++s) mbarrier_init(full + 8 * s, 1);
    mbarrier_init_fence();
  }
  if constexpr (kGateUp) {
    wait_for_kernel_before();
    // HAZARD: down reads ids before it waits for this kernel. It may: it starts after this line, so the router is done.
    let_next_kernel_start();
  }
  list_hits<kN, kGroups * 128>(c, hits, counts, order, counts + c.experts);
  const int num_hits = counts[c.experts], tiles = c.rows / kTileRows, total = num_hits * tiles;
  return {tiles, static_cast<int>(static_cast<int64_t>(total) * blockIdx.x / gridDim.x),
          static_cast<int>(static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x)};
}

// The issuing warp's place in the sequence of its warpgroup's chunks, always kStages ahead of what is multiplied.
template <int kGroups, int kStages, int kColumns>
struct Issuer {
  static constexpr int kChunks = (kColumns + 255) / 256;
  static_assert(kStages <= kChunks, "two buffers of scales last while a ring is no longer than a tile");
  const Run run;
  const bool is_first_lane;
  const uint32_t full;
  int row = 0, chunk = 0, stage = 0, buffer = 0, item;
  const uint32_t ring_at, scales_at;

  __device__ __forceinline__ Issuer(const Run& run, const RingLayout& l, uint8_t* shared, int group, bool is_first_lane)
      : run(run),
        is_first_lane(is_first_lane),
        full(shared_address(shared + l.barriers) + group * kStages * 8),
        item(run.begin + group),
        ring_at(shared_address(shared) + group * kStages * kChunkBytes),
        scales_at(shared_address(shared + l.scales) + group * 2 * l.scale_bytes) {}

  __device__ __forceinline__ void issue(const Call& c, const CUtensorMap& codes_map, const int4* hits, int scale_bytes) {
    if (item >= run.end) return;
    const uint32_t barrier = full + 8 * stage;
    if (chunk == 0) {
      const int number = item / run.tiles;
      row = hits[number].x * c.rows + (item - number * run.tiles) * kTileRows;
      arrive_expect_if(is_first_lane, barrier, kChunkBytes + scale_bytes);
      bulk_load_if(is_first_lane, scales_at + buffer * scale_bytes,
                   static_cast<const uint8_t*>(c.scales) + static_cast<size_t>(row) * (kColumns / 32), scale_bytes,
                   barrier);
      buffer ^= 1;
    } else {
      arrive_expect_if(is_first_lane, barrier, kChunkBytes);
    }
    tma_load_2d_if(is_first_lane, ring_at + stage * kChunkBytes, &codes_map, barrier, chunk * 128, row);
    if (++stage == kStages) stage = 0;
    if (++chunk == kChunks) chunk = 0, item += kGroups;
  }
};

}  // namespace rose::moe_decode
