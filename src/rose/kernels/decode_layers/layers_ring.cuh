// The warp that keeps the ring full: it knows the order of the weights and of the history, and waits only for stages, for
// the router, and for what it asked for before.
#pragma once

#include "layers_history.cuh"

namespace rose::layers {

// Items that a block has asked for and that have not come, by phase. One or two keep the memory busy (an item for each
// block is 3 MB, what memory moves in 0.7 us); more would wait in its queues, and so would whatever blocks exchange
// meanwhile: with all stages asked for at once an exchange took 6 us that takes 2.5.
constexpr int kInFlight = 1, kHistoryInFlight = 2, kLongHistoryInFlight = 3, kUpInFlight = 3;

template <class P>
struct Ring {
  Block<P>& block;
  int stage = 0, asked = 0, in_flight = kInFlight;
  uint32_t parity = 1;
  const uint64_t policy = read_once();
  static_assert(at_least(kLongHistoryInFlight, kUpInFlight) < P::kStages);

  // An empty stage, to which `bytes` will come.
  __device__ uint32_t take(uint32_t bytes) {
    mbarrier_wait(block.empty(stage), parity);
    if (asked >= in_flight) {
      // Its stage has not been asked for again, so that its barrier is still in the phase after it.
      const int before = stage - in_flight, at = before < 0 ? before + P::kStages : before;
      mbarrier_wait(block.full(at), before < 0 ? parity : parity ^ 1);
    }
    ++asked;
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
  __device__ void load_rows(const __nv_bfloat16* matrix, int first) {
    const uint32_t target = take(kRows * kColumns * 2);
    const __nv_bfloat16* source = matrix + static_cast<size_t>(first) * kColumns;
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

  // Units of a block's history: keys, then values.
  __device__ void load_units(const History<P>& history) {
    for (int first = history.begin; first < history.end; first += P::kItemUnits) {
      const __nv_bfloat16* keys[P::kItemUnits];
#pragma unroll
      for (int u = 0; u < P::kItemUnits; ++u) keys[u] = history.keys(min(first + u, history.end - 1));
      const int units = min(P::kItemUnits, history.end - first);
      const uint32_t target = take(units * 2 * P::kUnitBytes), barrier = block.full(stage);
#pragma unroll
      for (int u = 0; u < P::kItemUnits; ++u) {
        if (u >= units) break;
        const uint32_t to = target + u * 2 * P::kUnitBytes;
        load(to, keys[u], P::kUnitBytes, barrier);
        load(to + P::kUnitBytes, keys[u] + history.to_values(), P::kUnitBytes, barrier);
      }
      next();
    }
  }

  // One thread.
  __device__ void run() {
    const Share qkv = Block<P>::qkv_items(), up = Block<P>::up_items();
    const int first_row = Block<P>::first_row();
    for (int l = 0; l < block.call.num_layers; ++l) {
      const Layer& layer = block.small.layers[l];
      in_flight = kInFlight;
      for (int i = qkv.begin; i < qkv.end; ++i) load_rows<P::kQkvItemRows, P::kHidden>(layer.qkv, Block<P>::qkv_row(i));
      if (l == 0) moe_decode::wait_for_kernel_before();  // weights were there before any step began
      const History<P> history(block.call, layer, *block.call.length);
      in_flight = history.items() > P::kStages ? kLongHistoryInFlight : kHistoryInFlight;
      load_units(history);
      in_flight = kInFlight;
      for (int i = 0; i < P::kOutItems; ++i) {
        load_rows<P::kOutItemRows, P::kAttended>(layer.out, first_row + i * P::kOutItemRows);
      }
      mbarrier_wait(shared_address(&block.small.routed), l & 1);
      const auto& chosen = block.small.chosen;
      in_flight = kUpInFlight;
      for (int i = up.begin; i < up.end; ++i) {
        const size_t row = static_cast<size_t>(chosen[i / P::kUpItems]) * 2 * P::kInner + i % P::kUpItems * 2 * kTileRows;
        load_tiles<P::kHidden>(layer.up_codes, layer.up_scales, row);
      }
      in_flight = kInFlight;
      for (int row = first_row; row < first_row + P::kOwnRows; row += kTileRows) {
        for (int k = 0; k < kChosen; k += 2) {
          const size_t first = static_cast<size_t>(chosen[k]) * P::kHidden + row;
          const size_t second = static_cast<size_t>(chosen[k + 1]) * P::kHidden + row;
          load_tile_each<P::kInner>(layer.down_codes, layer.down_scales, first, second);
        }
      }
    }
  }
};

}  // namespace rose::layers
