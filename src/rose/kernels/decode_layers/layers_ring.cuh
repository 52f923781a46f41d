// The warp that keeps the ring full: it knows the order of the weights, and waits only for stages and for the router.
#pragma once

#include "layers_block.cuh"

namespace rose::layers {

template <class P>
struct Ring {
  Block<P>& block;
  int stage = 0;
  uint32_t parity = 1;
  const uint64_t policy = read_once();

  // An empty stage, to which `bytes` will come.
  __device__ uint32_t take(uint32_t bytes) {
    mbarrier_wait(block.empty(stage), parity);
    mbarrier_arrive_expect(block.full(stage), bytes);
    return shared_address(block.stage(stage));
  }

  __device__ void load(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) const {
    bulk_load_once(target, source, bytes, barrier, policy);
  }

  __device__ void next() {
    if (++stage == P::kStages) stage = 0, parity ^= 1;
  }

  // kRows rows of bf16, each to a place of its own.
  template <int kRows, int kColumns>
  __device__ void load_rows(const __nv_bfloat16* matrix, int number) {
    const uint32_t target = take(kRows * kColumns * 2);
    const __nv_bfloat16* source = matrix + static_cast<size_t>(number) * kRows * kColumns;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      load(target + r * (kColumns * 2 + kPad), source + r * kColumns, kColumns * 2, block.full(stage));
    }
    next();
  }

  // Two tiles of mxfp4 that lie together.
  template <int kColumns>
  __device__ void load_tiles(const uint8_t* codes, const uint8_t* scales, size_t row) {
    constexpr int kRows = 2 * kTileRows;
    const uint32_t target = take(kRows * (kColumns / 2 + kColumns / 32));
    load(target, codes + row * (kColumns / 2), kRows * kColumns / 2, block.full(stage));
    load(target + kRows * kColumns / 2, scales + row * (kColumns / 32), kRows * kColumns / 32, block.full(stage));
    next();
  }

  // A tile of each of two experts: the tiles lie, codes and scales, as two of one expert do.
  template <int kColumns>
  __device__ void load_tile_each(const uint8_t* codes, const uint8_t* scales, size_t first, size_t second) {
    constexpr int kCodes = kTileRows * kColumns / 2, kScales = kTileRows * kColumns / 32;
    const uint32_t target = take(2 * (kCodes + kScales)), barrier = block.full(stage);
    load(target, codes + first * (kColumns / 2), kCodes, barrier);
    load(target + kCodes, codes + second * (kColumns / 2), kCodes, barrier);
    load(target + 2 * kCodes, scales + first * (kColumns / 32), kScales, barrier);
    load(target + 2 * kCodes + kScales, scales + second * (kColumns / 32), kScales, barrier);
    next();
  }

  // One thread.
  __device__ void run() {
    const Share qkv = Block<P>::qkv_items(), out = Block<P>::out_items();
    const Share up = Block<P>::up_items(), groups = Block<P>::down_groups();
    for (int l = 0; l < block.call.num_layers; ++l) {
      const Layer& layer = block.small.layers[l];
      for (int i = qkv.begin; i < qkv.end; ++i) load_rows<P::kQkvItemRows, P::kHidden>(layer.qkv, i);
      for (int i = out.begin; i < out.end; ++i) load_rows<P::kOutItemRows, P::kAttended>(layer.out, i);
      mbarrier_wait(shared_address(&block.small.routed), l & 1);
      const auto& chosen = block.small.chosen;
      for (int i = up.begin; i < up.end; ++i) {
        const size_t row = static_cast<size_t>(chosen[i / P::kUpItems]) * 2 * P::kInner + i % P::kUpItems * 2 * kTileRows;
        load_tiles<P::kHidden>(layer.up_codes, layer.up_scales, row);
      }
      for (int i = groups.begin; i < groups.end; ++i) {
        for (int k = 0; k < kChosen; k += 2) {
          const size_t first = static_cast<size_t>(chosen[k]) * P::kHidden + i * kTileRows;
          const size_t second = static_cast<size_t>(chosen[k + 1]) * P::kHidden + i * kTileRows;
          load_tile_each<P::kInner>(layer.down_codes, layer.down_scales, first, second);
        }
      }
    }
  }
};

}  // namespace rose::layers
