// The kernel: what the warps that multiply do in a layer, phase by phase, and who does what in a block.
#pragma once

#include "layers_attention.cuh"
#include "layers_finish.cuh"
#include "layers_multiply.cuh"
#include "layers_ring.cuh"
#include "layers_route.cuh"

namespace rose::layers {

template <class P>
struct Multiply {
  Block<P>& block;
  int item = 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int team = warp / P::kTeamWarps, team_warp = warp % P::kTeamWarps;
  Turn<P> turn{team};

  // The residual stream, normalised, to shared memory. Its chunks of eight columns are in registers between the two
  // passes.
  struct Norm {
    static constexpr int kChunks = P::kHidden / 8, kSteps = (kChunks + P::kMultiplying - 1) / P::kMultiplying;
    float4 weights[kSteps][2];

    __device__ static int chunk(int i) { return i * P::kMultiplying + static_cast<int>(threadIdx.x); }

    // Asks for the weights; nothing here depends on the step.
    __device__ explicit Norm(const float* norm) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (chunk(i) >= kChunks) break;
        weights[i][0] = __ldg(reinterpret_cast<const float4*>(norm) + 2 * chunk(i));
        weights[i][1] = __ldg(reinterpret_cast<const float4*>(norm) + 2 * chunk(i) + 1);
      }
    }
  };

  template <bool kIsFourBit>
  __device__ void normalise(const Norm& norm) const {
    const uint4* row = reinterpret_cast<const uint4*>(block.call.residual);
    uint4 x[Norm::kSteps];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < Norm::kSteps; ++i) {
      if (Norm::chunk(i) >= Norm::kChunks) break;
      x[i] = __ldcg(row + Norm::chunk(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float a = low(moe_decode::word(x[i], j)), b = high(moe_decode::word(x[i], j));
        squares += a * a + b * b;
      }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) squares += shuffle_xor(squares, d);
    if (lane == 0) block.small.squares[warp] = squares;
    Block<P>::sync_multiplying();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < P::kWarps; ++w) sum += block.small.squares[w];
    const float scale = rsqrtf(sum * (1.0f / P::kHidden) + block.call.eps);
#pragma unroll
    for (int i = 0; i < Norm::kSteps; ++i) {
      if (Norm::chunk(i) >= Norm::kChunks) break;
      const float4 a = norm.weights[i][0], b = norm.weights[i][1];
      uint4 y;
      y.x = pack_bf16(low(x[i].x) * scale * a.x, high(x[i].x) * scale * a.y);
      y.y = pack_bf16(low(x[i].y) * scale * a.z, high(x[i].y) * scale * a.w);
      y.z = pack_bf16(low(x[i].z) * scale * b.x, high(x[i].z) * scale * b.y);
      y.w = pack_bf16(low(x[i].w) * scale * b.z, high(x[i].w) * scale * b.w);
      uint8_t* to = block.activations();
      if constexpr (kIsFourBit) {
        *reinterpret_cast<uint4*>(to + four_bit_place(Norm::chunk(i))) = four_bit_order(y);
      } else {
        *reinterpret_cast<uint4*>(to + Norm::chunk(i) * 16) = y;
      }
    }
    Block<P>::sync_multiplying();
  }

  // Rows of activations from memory to shared memory.
  template <int kRows, int kColumns, bool kIsFourBit>
  __device__ void load_rows(const __nv_bfloat16* rows) const {
    constexpr int kRow = kIsFourBit ? P::four_bit_row(kColumns) : kColumns * 2 + kPad;
    constexpr int kChunks = kColumns / 8, kTotal = kRows * kChunks;
    constexpr int kSteps = (kTotal + P::kMultiplying - 1) / P::kMultiplying;
    uint4 x[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int i = s * P::kMultiplying + threadIdx.x;
      if (i < kTotal) x[s] = __ldcg(reinterpret_cast<const uint4*>(rows) + i);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int i = s * P::kMultiplying + threadIdx.x, row = i / kChunks, chunk = i % kChunks;
      if (i >= kTotal) break;
      uint8_t* to = block.activations() + row * kRow;
      if constexpr (kIsFourBit) {
        *reinterpret_cast<uint4*>(to + four_bit_place(chunk)) = four_bit_order(x[s]);
      } else {
        *reinterpret_cast<uint4*>(to + chunk * 16) = x[s];
      }
    }
    Block<P>::sync_multiplying();
  }

  // One item: `product(stage)`, `put(parts, product)` for this team's finisher, the stage back to the ring.
  template <class Product, class Put>
  __device__ void take(Product product, Put put) {
    mbarrier_wait(block.full(turn.stage), turn.parity);
    const auto result = product(block.stage(turn.stage));
    mbarrier_wait(block.part_empty(team, turn.buffer), turn.part_parity ^ 1);
    put(block.parts(team, turn.buffer) + team_warp * 16, result);
    __syncwarp();
    mbarrier_arrive_warp(block.part_full(team, turn.buffer), lane);
    mbarrier_arrive_warp(block.empty(turn.stage), lane);
    turn.next();
  }

  // Where this team's items of a phase begin among the block's.
  __device__ int first_own() const { return (team + item) % kTeams; }

  template <int kRows, int kColumns>
  __device__ void multiply_share(const Share& share) {
    using Rows = RowProduct<kColumns, P::kTeamWarps>;
    const Rows rows = Rows::of(block.activations(), team_warp);
    for (int i = first_own(); i < share.size(); i += kTeams) {
      take([&](const uint8_t* stage) { return rows.template multiply<kRows>(stage, team_warp); }, put_rows);
    }
    item += share.size();
  }

  struct Product {
    float acc[4] = {};
  };

  // Items of gate_up: `first` is that of the block among all of the phase. Of down: `first` is -1. One code for both where
  // their columns are as many: instructions that are in the cache already.
  template <int kColumns>
  __device__ void multiply_experts(int first, int count) {
#pragma unroll 1
    for (int i = first_own(); i < count; i += kTeams) {
      // Of gate_up all have the token; of down, the two experts of an item have an activation each.
      const int k = first >= 0 ? 0 : i % (kChosen / 2) * 2 + (lane >> 2 & 1);
      const uint8_t* token = block.activations() + k * P::kDownRow;
      take(
          [&](const uint8_t* stage) {
            Product product;
            multiply_tiles<kColumns, P::kTeamWarps>(product.acc, stage, token, team_warp);
            return product;
          },
          [](float* parts, const Product& product) { put_tiles(parts, product.acc); });
    }
    item += count;
  }

  // Everybody is past a phase: one thread asks, all know.
  __device__ void wait_for_all(int layer, Phase phase) const {
    if (threadIdx.x == 0) block.wait_for_all(layer, phase);
    Block<P>::sync_multiplying();
  }

  __device__ void begin_down(int l) const {
    block.mark(l, kUpDone);
    wait_for_all(l, kUp);
    block.mark(l, kUpThere);
    load_rows<kChosen, P::kInner, true>(block.act());
    block.mark(l, kDownBegun);
  }

  __device__ void run() {
    const AttentionInput<P> input(block.call);
    input.keep_turns(block.small);
    for (int l = 0; l < block.call.num_layers; ++l) {
      const Layer& layer = block.small.layers[l];
      {
        const Norm norm(layer.attention_norm);
        if (l > 0) wait_for_all(l - 1, kDown);
        block.mark(l, kBegun);
        normalise<false>(norm);
      }
      block.mark(l, kNormed);
      multiply_share<P::kQkvItemRows, P::kHidden>(Block<P>::qkv_items());
      block.mark(l, kQkvDone);
      const Attention<P> attention(block, layer, input);
      if (attention.is_active()) {
        attention.run([&] {
          wait_for_all(l, kQkv);
          block.mark(l, kQkvThere);
        });
        Block<P>::sync_multiplying();
      }
      block.mark(l, kAttentionDone);
      if (threadIdx.x == 0) block.arrive_for_all(kAttend, kTeams);
      wait_for_all(l, kAttend);
      block.mark(l, kAttentionThere);
      load_rows<1, P::kAttended, false>(block.attended());
      block.mark(l, kOutBegun);
      multiply_share<P::kOutItemRows, P::kAttended>(Block<P>::out_items());
      block.mark(l, kOutDone);
      {
        const Norm norm(layer.expert_norm);
        Router<P> router(block, layer);
        wait_for_all(l, kOut);
        block.mark(l, kOutThere);
        normalise<true>(norm);
        router.send();
        router.choose(layer, l);
      }
      mbarrier_wait(shared_address(&block.small.routed), l & 1);
      block.mark(l, kRouted);
      if constexpr (P::kHidden == P::kInner) {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          if (half == 1) begin_down(l);
          multiply_experts<P::kHidden>(half == 0 ? Block<P>::up_items().begin : -1,
                                       half == 0 ? Block<P>::up_items().size() : Block<P>::down_items());
        }
      } else {
        multiply_experts<P::kHidden>(Block<P>::up_items().begin, Block<P>::up_items().size());
        begin_down(l);
        multiply_experts<P::kInner>(-1, Block<P>::down_items());
      }
      block.mark(l, kDownDone);
    }
  }
};

// Grid: P::kBlocks blocks in clusters of P::kCluster, all resident at once; they wait for each other.
template <class P>
__global__ void __launch_bounds__(P::kThreads, 1) layers_kernel(const Call call) {
  Block<P> block(call);
  auto& small = block.small;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int64_t* table = reinterpret_cast<const int64_t*>(call.layers);
  for (int i = threadIdx.x; i < call.num_layers * static_cast<int>(sizeof(Layer) / 8); i += P::kThreads) {
    reinterpret_cast<int64_t*>(small.layers)[i] = __ldg(table + i);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < P::kStages; ++s) {
      mbarrier_init(shared_address(&small.full[s]), 1);
      mbarrier_init(shared_address(&small.empty[s]), P::kTeamWarps * kWarpArrivals);
    }
    for (int team = 0; team < kTeams; ++team) {
      for (int s = 0; s < kParts; ++s) {
        mbarrier_init(shared_address(&small.part_full[team][s]), P::kTeamWarps * kWarpArrivals);
        mbarrier_init(shared_address(&small.part_empty[team][s]), kWarpArrivals);
      }
    }
    mbarrier_init(shared_address(&small.routed), kWarpArrivals);
    mbarrier_init(shared_address(&small.logits_in), P::kCluster);
    mbarrier_init_fence();
  }
  cluster_sync();
  if (warp >= P::kWarps) {
    registers_shrink<P::kOtherRegisters>();
    if (warp == P::kWarps + kTeams) {
      // Weights were there before any step began.
      if (lane == 0) Ring<P>{block}.run();
    } else if (warp < P::kWarps + kTeams) {
      moe_decode::wait_for_kernel_before();
      Finish<P>{block, warp - P::kWarps, lane}.run();
    }
  } else {
    registers_grow<P::kMultiplyRegisters>();
    moe_decode::wait_for_kernel_before();
    moe_decode::let_next_kernel_start();
    Multiply<P>{block}.run();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    // The last to leave resets the counters for the next launch: nobody asks them any more. Ordered, because what blocks
    // added to other counters must not arrive there after the zeros.
    Counters& counters = block.counters();
    if (add_one_ordered(&counters.left.value) == P::kBlocks - 1) {
      for (Counter& counter : counters.arrived) counter.value = 0;
      counters.left.value = 0;
    }
  }
}

}  // namespace rose::layers
