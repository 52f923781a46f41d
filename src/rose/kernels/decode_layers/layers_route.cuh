// The router inside the layers: every cluster computes all logits, a share of the columns to each of its blocks, and
// every block chooses for itself, from the same sums in the same order.
#pragma once

#include "layers_block.cuh"
#include "layers_multiply.cuh"

namespace rose::layers {

// Rises with the value; both zeros are equal.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <class P>
struct Router {
  static constexpr int kEach = P::kMultiplying / P::kExperts;  // threads of an expert, neighbours in a warp
  static constexpr int kChunks = P::kHidden / 8, kMostChunks = (kChunks + P::kCluster - 1) / P::kCluster;
  static constexpr int kSteps = (kMostChunks + kEach - 1) / kEach;
  static_assert(P::kMultiplying % P::kExperts == 0 && (kEach & (kEach - 1)) == 0 && kEach <= 32 && kEach >= 1);

  // More would not stay in registers while others are awaited: they come as far as the L2 cache then.
  static constexpr bool kIsKept = kSteps <= 4;

  Block<P>& block;
  const uint4* row;
  uint4 weights[kSteps];
  int expert, sub, rank, begin, end;  // chunks [begin, end) of this block

  // Asks for the weights; nothing here depends on the step.
  __device__ Router(Block<P>& b, const Layer& layer) : block(b) {
    expert = threadIdx.x / kEach, sub = threadIdx.x % kEach, rank = blockIdx.x % P::kCluster;
    begin = kChunks * rank / P::kCluster, end = kChunks * (rank + 1) / P::kCluster;
    row = reinterpret_cast<const uint4*>(layer.router + static_cast<size_t>(expert) * P::kHidden);
    if constexpr (kIsKept) {
      load();
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int chunk = begin + sub + i * kEach;
        if (chunk < end) prefetch_line(row + chunk);
      }
    }
  }

  __device__ void load() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int chunk = begin + sub + i * kEach;
      weights[i] = chunk < end ? __ldg(row + chunk) : uint4{};
    }
  }

  // [ranks][experts]: parts of the logits, from all blocks of the cluster.
  __device__ float* logits(int from) const {
    return reinterpret_cast<float*>(block.shared + P::kLogitsAt) + from * P::kExperts;
  }

  // This block's part of the logits to all blocks of the cluster; activations lie in the order of four-bit codes.
  __device__ void send() {
    if constexpr (!kIsKept) load();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int chunk = begin + sub + i * kEach;
      if (chunk >= end) break;
      const uint4 x = *reinterpret_cast<const uint4*>(block.activations() + four_bit_place(chunk));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Word j of x has columns j and j + 4.
        const uint32_t pair = moe_decode::word(x, j), w_low = moe_decode::word(weights[i], j >> 1),
                       w_high = moe_decode::word(weights[i], 2 + (j >> 1));
        const float a = __uint_as_float(j & 1 ? w_low & 0xFFFF0000u : w_low << 16);
        const float b = __uint_as_float(j & 1 ? w_high & 0xFFFF0000u : w_high << 16);
        sum += a * __uint_as_float(pair << 16) + b * __uint_as_float(pair & 0xFFFF0000u);
      }
    }
#pragma unroll
    for (int d = kEach / 2; d > 0; d /= 2) sum += shuffle_xor(sum, d);
    const uint32_t here = shared_address(logits(rank) + expert);
    for (int to = sub; to < P::kCluster; to += kEach) store_remote(remote_address(here, to), sum);
    Block<P>::sync_multiplying();
    const uint32_t barrier = shared_address(&block.small.logits_in);
    if (threadIdx.x < P::kCluster) arrive_remote(remote_address(barrier, threadIdx.x));
  }

  // One warp: chooses, and tells everybody.
  __device__ void choose(const Layer& layer, int number_of_layer) const {
    constexpr int kMine = P::kExperts / 32;
    auto& small = block.small;
    const int lane = threadIdx.x & 31;
    if (threadIdx.x >= 32) return;
    float bias[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) bias[i] = __bfloat162float(layer.router_bias[i * 32 + lane]);
    Block<P>::wait_cluster(shared_address(&small.logits_in), number_of_layer & 1);
    float logit[kMine];
    uint32_t keys[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      float sum = logits(0)[i * 32 + lane];
#pragma unroll
      for (int r = 1; r < P::kCluster; ++r) sum += logits(r)[i * 32 + lane];
      logit[i] = sum + bias[i];
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
