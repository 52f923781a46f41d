// The router inside the layers: a block computes the logits of an expert or two, and every block chooses for itself.
#pragma once

#include "layers_block.cuh"

namespace rose::layers {

// Rises with the value; both zeros are equal.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <class P>
struct Router {
  static constexpr int kMost = P::kMostOwnExperts;
  static constexpr int kChunks = P::kHidden / 8, kSteps = P::steps(kChunks);

  Block<P>& block;
  const Layer& layer;
  uint4 weights[kMost][kSteps];
  float sums[kMost] = {};
  Share own;

  // Asks for the weights; nothing here depends on the step.
  __device__ Router(Block<P>& b, const Layer& l) : block(b), layer(l), own(Block<P>::experts()) {
#pragma unroll
    for (int e = 0; e < kMost; ++e) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int chunk = i * P::kMultiplying + threadIdx.x;
        const bool is_mine = e < own.size() && chunk < kChunks;
        const auto* row = reinterpret_cast<const uint4*>(layer.router + static_cast<size_t>(own.begin + e) * P::kHidden);
        weights[e][i] = is_mine ? __ldg(row + chunk) : uint4{};
      }
    }
  }

  // Eight columns of the token, step i of this thread.
  __device__ void add(int i, const uint4& x) {
#pragma unroll
    for (int e = 0; e < kMost; ++e) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t a = moe_decode::word(x, j), b = moe_decode::word(weights[e][i], j);
        sums[e] += low(a) * low(b) + high(a) * high(b);
      }
    }
  }

  // The warps' sums to shared memory; a barrier of the block follows.
  __device__ void keep() {
#pragma unroll
    for (int e = 0; e < kMost; ++e) {
      if (e >= own.size()) break;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sums[e] += shuffle_xor(sums[e], d);
      if (threadIdx.x % 32 == 0) block.small.logits[e][threadIdx.x / 32] = sums[e];
    }
  }

  // One warp: this block's logits to all.
  __device__ void send(int number_of_layer) const {
    const int lane = threadIdx.x & 31;
    static_assert(kMost <= 32);
    if (lane >= own.size()) return;
    float sum = __bfloat162float(layer.router_bias[own.begin + lane]);
#pragma unroll
    for (int w = 0; w < P::kWarps; ++w) sum += block.small.logits[lane][w];
    store_for_all(logits(number_of_layer) + own.begin + lane, __float_as_uint(sum));
  }

  __device__ uint32_t* logits(int number_of_layer) const {
    return block.template exchange<uint32_t>(number_of_layer, P::Exchange::kLogits);
  }

  // One warp: chooses, and tells everybody.
  __device__ void choose(int number_of_layer) const {
    constexpr int kMine = P::kExperts / 32;
    auto& small = block.small;
    const int lane = threadIdx.x & 31;
    uint32_t received[kMine];
    Block<P>::receive(received, [](int) { return true; },
                      [&](int i) { return load_shared_by_all(logits(number_of_layer) + i * 32 + lane); });
    float logit[kMine];
    uint32_t keys[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      logit[i] = __uint_as_float(received[i]);
      keys[i] = max(ordered(logit[i]), 1u);
    }
    float best = 0, mine = 0;
    int id = 0;
#pragma unroll
    for (int k = 0; k < kChosen; ++k) {
      uint32_t top = keys[0];
#pragma unroll
      for (int i = 1; i < kMine; ++i) top = max(top, keys[i]);
      top = warp_max(top);
      uint32_t lowest = P::kExperts;
#pragma unroll
      for (int i = kMine - 1; i >= 0; --i) lowest = keys[i] == top ? i * 32 + lane : lowest;
      lowest = warp_min(lowest);
      float value = 0;
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (static_cast<int>(lowest >> 5) == i) value = logit[i];
      }
      value = shuffle(value, lowest & 31);
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (lowest == static_cast<uint32_t>(i * 32 + lane)) keys[i] = 0;
      }
      if (k == 0) best = value;
      if (lane == k) mine = value, id = lowest;
    }
    const float p = lane < kChosen ? exp2_fast((mine - best) * 1.4426950408889634f) : 0.0f;
    float total = 0;
#pragma unroll
    for (int k = 0; k < kChosen; ++k) total += shuffle(p, k);
    if (lane < kChosen) {
      small.chosen[lane] = id;
      small.weights[lane] = __bfloat162float(__float2bfloat16(p / total));
    }
    __syncwarp();
    mbarrier_arrive_warp(shared_address(&small.routed), lane);
  }
};

}  // namespace rose::layers
