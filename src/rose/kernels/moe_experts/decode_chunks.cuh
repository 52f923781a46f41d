// What decode experts share whose codes pass through a ring of chunks (decode_e4m3.cuh): where things lie in shared memory,
// which tiles a block has, who fills the ring.
//
// A tile is 64 rows of one expert's matrix, a chunk 64 rows by 256 columns (128 bytes of codes, swizzled). Tiles are dealt
// out to blocks in contiguous runs; the warpgroups that multiply share out the chunks of each tile, one after the other,
// so that a block works at one tile at a time, ends with its last tile, and needs the scales of few. One
// warp of a further warpgroup fills the ring by the tensor copy engine, ahead across tiles and experts; two add up the
// warpgroups' parts of a tile and write the result. A tile's scales come to a place of their own, with a barrier of their
// own: all warpgroups wait for them, and only one for each chunk.
#pragma once

#include "decode_call.cuh"
#include "mbarrier.cuh"
#include "ring.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace rose::moe_decode {

constexpr int kTileRows = 64;
constexpr int kChunkBytes = kTileRows * 128;
constexpr int kChunkColumns = 256;
// Past the last row's last block a row ends that has none: lanes read there, for codes that are zeros.
constexpr int kScalePad = 16;
constexpr int kFinishers = 2;             // warps that add up
constexpr uint32_t kMultiplyBarrier = 1;  // of all that multiply; 0 is __syncthreads
constexpr uint32_t kBeginBarrier = 2;     // of these and of the warp that fills the ring

// kScales: buffers of the scales of a tile; kParts: of its parts.
template <int kN_, int kGroups_, int kStages_, int kScales_, int kParts_>
struct Shape {
  static constexpr int kN = kN_, kGroups = kGroups_, kStages = kStages_, kScales = kScales_, kParts = kParts_;
  static constexpr int kThreads = kGroups * 128 + 128;  // warpgroups that multiply, and one that does not
  static constexpr int kPartBytes = kTileRows * kN * 4;  // of one warpgroup
  // Or a warpgroup that is ahead would ask for a round of a stage whose round before, of another one, has not come, and
  // take its parity for an answer.
  static_assert(kStages % kGroups == 0, "a stage is always of the same warpgroup");
  static_assert(kStages >= 2 * kGroups, "a stage is given back once the next one has come");
};

struct RingLayout {
  int x, scale_bytes, scale_stride, scales, parts, barriers, own, counts, hits, order, total;

  // own_bytes: at `own`, of what only this kernel has.
  template <class S>
  __host__ __device__ static RingLayout make(const Call& c, int own_bytes = 0) {
    RingLayout l;
    l.x = S::kStages * kChunkBytes;
    l.scale_bytes = kTileRows * (c.columns / 32);
    l.scale_stride = l.scale_bytes + kScalePad;
    l.scales = l.x + (c.columns + 127) / 128 * S::kN * 256;
    l.parts = l.scales + S::kScales * l.scale_stride;
    l.barriers = l.parts + S::kParts * S::kGroups * S::kPartBytes;
    l.own = l.barriers + ((S::kStages + S::kParts) * 2 + S::kScales + 1) / 2 * 16;
    l.hits = l.own + (own_bytes + 15) / 16 * 16;
    int most = (c.pairs < c.experts ? c.pairs : c.experts) + c.pairs / S::kN + 1;
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

// A tile of a run.
struct Tile {
  int hit, expert, number;

  __device__ static Tile of(int item, const Run& run, const int4* hits) {
    const int hit = item / run.tiles;
    return {hit, hits[hit].x, item - hit * run.tiles};
  }
  __device__ int exponent(const Call& c, const Run& run) const {
    return __ldg(c.exponents + static_cast<size_t>(expert) * run.tiles + number);
  }
};

// Addresses in shared memory.
template <class S>
struct Ring {
  uint32_t chunks, scales, full, empty, part_full, part_empty, scales_full;

  __device__ __forceinline__ Ring(const RingLayout& l, uint8_t* shared)
      : chunks(shared_address(shared)),
        scales(shared_address(shared + l.scales)),
        full(shared_address(shared + l.barriers)),
        empty(full + S::kStages * 8),
        part_full(empty + S::kStages * 8),
        part_empty(part_full + S::kParts * 8),
        scales_full(part_empty + S::kParts * 8) {}

  // One thread.
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < S::kStages; ++s) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, 4 * kWarpArrivals);
    }
    for (int s = 0; s < S::kParts; ++s) {
      mbarrier_init(part_full + 8 * s, S::kGroups * 4 * kWarpArrivals);
      mbarrier_init(part_empty + 8 * s, kFinishers * kWarpArrivals);
    }
    for (int s = 0; s < S::kScales; ++s) mbarrier_init(scales_full + 8 * s, 1);
  }

  // One thread: all chunks of the block's tiles, each as soon as its place is empty.
  template <int kColumns>
  __device__ __forceinline__ void fill(const Call& c, const CUtensorMap& codes_map, const int4* hits, const Run& run,
                                       const RingLayout& l) const {
    constexpr int kChunks = (kColumns + kChunkColumns - 1) / kChunkColumns;
    // Where the first chunk of a tile goes there was one of at most kScales - 1 tiles before; stages are asked for in turn,
    // so that everything before that one has been multiplied.
    static_assert(S::kStages <= (S::kScales - 1) * kChunks, "a tile's scales last until it has been multiplied");
    Cursor<S::kStages> at;
    Cursor<S::kScales> scale;
    for (int item = run.begin; item < run.end; ++item, scale.advance()) {
      const Tile tile = Tile::of(item, run, hits);
      const int row = tile.expert * c.rows + tile.number * kTileRows;
      for (int chunk = 0; chunk < kChunks; ++chunk, at.advance()) {
        const uint32_t barrier = full + 8 * at.stage;
        mbarrier_wait(empty + 8 * at.stage, at.parity ^ 1);
        if (chunk == 0) {
          mbarrier_arrive_expect(scales_full + 8 * scale.stage, l.scale_bytes);
          bulk_load(scales + scale.stage * l.scale_stride,
                    static_cast<const uint8_t*>(c.scales) + static_cast<size_t>(row) * (kColumns / 32), l.scale_bytes,
                    scales_full + 8 * scale.stage);
        }
        mbarrier_arrive_expect(barrier, kChunkBytes);
        tma_load_2d(chunks + at.stage * kChunkBytes, &codes_map, barrier, chunk * 128, row);
      }
    }
  }
};

// How far a warpgroup has come in the ring.
template <class S>
struct Turn {
  int stage;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    stage += S::kGroups;
    if (stage >= S::kStages) stage -= S::kStages, parity ^= 1;
  }
};

// Lists of hits, and this block's run. Kernels of gate_up wait for the router first.
template <bool kGateUp, int kN, int kThreads>
__device__ __forceinline__ Run begin_run(const Call& c, int4* hits, int* counts, uint16_t* order) {
  if constexpr (kGateUp) {
    wait_for_kernel_before();
    // HAZARD: down reads ids before it waits for this kernel. It may: it starts after this line, so the router is done.
    let_next_kernel_start();
  }
  list_hits<kN, kThreads>(c, hits, counts, order, counts + c.experts);
  const int num_hits = counts[c.experts], tiles = c.rows / kTileRows, total = num_hits * tiles;
  return {tiles, static_cast<int>(static_cast<int64_t>(total) * blockIdx.x / gridDim.x),
          static_cast<int>(static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x)};
}

}  // namespace rose::moe_decode
