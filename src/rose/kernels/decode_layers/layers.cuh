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
  using Exchange = typename P::Exchange;

  Block<P>& block;
  int item = 0;
  // In a way that shows the compiler that all lanes agree.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0), lane = threadIdx.x & 31;
  const int team = warp / P::kTeamWarps, team_warp = warp % P::kTeamWarps;
  Turn<P> turn{team};

  // Weights of the residual stream's norm. Its chunks of eight columns are in registers between the two passes.
  struct Norm {
    static constexpr int kChunks = P::kHidden / 8, kSteps = P::steps(kChunks);
    static_assert(kSteps == P::steps(P::kHiddenChunks));
    float4 weights[kSteps][2] = {};

    // Asks for the weights; nothing here depends on the step.
    __device__ explicit Norm(const float* norm) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (Block<P>::place(i) >= kChunks) break;
        weights[i][0] = __ldg(reinterpret_cast<const float4*>(norm) + 2 * Block<P>::place(i));
        weights[i][1] = __ldg(reinterpret_cast<const float4*>(norm) + 2 * Block<P>::place(i) + 1);
      }
    }
  };

  // `row`: the stream, in the exchange if `is_received`. `take(i, x)` is given what this thread has of it, normalised, then
  // `keep()` is called, and all threads have done so.
  template <class Take, class Keep>
  __device__ void normalise(const Norm& norm, const uint4* row, bool is_received, Take take, Keep keep) const {
    uint4 x[Norm::kSteps] = {};
    if (is_received) {
      receive_row<Norm::kChunks>(x, row);
    } else {
#pragma unroll
      for (int i = 0; i < Norm::kSteps; ++i) {
        if (Block<P>::place(i) < Norm::kChunks) x[i] = __ldcg(row + Block<P>::place(i));
      }
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < Norm::kSteps; ++i) {
      if (Block<P>::place(i) >= Norm::kChunks) break;
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
      if (Block<P>::place(i) >= Norm::kChunks) break;
      const float4 a = norm.weights[i][0], b = norm.weights[i][1];
      uint4 y;
      y.x = pack_bf16(low(x[i].x) * scale * a.x, high(x[i].x) * scale * a.y);
      y.y = pack_bf16(low(x[i].y) * scale * a.z, high(x[i].y) * scale * a.w);
      y.z = pack_bf16(low(x[i].z) * scale * b.x, high(x[i].z) * scale * b.y);
      y.w = pack_bf16(low(x[i].w) * scale * b.z, high(x[i].w) * scale * b.w);
      take(i, y);
    }
    keep();
    Block<P>::sync_multiplying();
  }

  // Eight numbers of a token to shared memory: chunk `number`.
  __device__ void put_chunk(int number, const uint4& x) const {
    *reinterpret_cast<uint4*>(block.activations() + number * 16) = x;
  }

  // The largest magnitude of a warp's chunks, to place `number`; then, a barrier later, that of kCount places.
  __device__ void keep_largest(int number, const uint4& x) const {
    using moe_decode::larger_magnitudes;
    const uint32_t both = larger_magnitudes(larger_magnitudes(x.x, x.y), larger_magnitudes(x.z, x.w));
    const uint32_t largest = warp_max(larger_halves(both, both >> 16) & 0x7FFF);
    if (lane == 0) block.small.largest[number] = largest;
  }
  template <int kCount>
  __device__ uint32_t largest_of(int first) const {
    static_assert(kCount <= 32);
    return warp_max(lane < kCount ? block.small.largest[first + lane] : 0);
  }

  // The token of gate_up, of which the largest magnitudes were kept; zeros past the last column.
  __device__ void put_token(const uint4 (&x)[Norm::kSteps]) const {
    const TokenScale token(largest_of<Norm::kSteps * P::kWarps>(0));
    if (threadIdx.x == 0) block.small.up_factor = token.factor;
#pragma unroll
    for (int i = 0; i < Norm::kSteps; ++i) {
      if (Block<P>::place(i) >= P::kHiddenChunks) break;
      put_split(block.activations(), Block<P>::place(i), x[i], token.scale);
    }
    fence_proxy_async();
    Block<P>::sync_multiplying();
  }

  // kChunks chunks of eight numbers that other blocks write, one to a thread in turn.
  template <int kChunks, int kSteps>
  __device__ static void receive_row(uint4 (&x)[kSteps], const uint4* row) {
    static_assert(kSteps == P::steps(kChunks));
    Block<P>::receive(x, [](int s) { return Block<P>::place(s) < kChunks; },
                      [&](int s) { return load_shared_by_all(row + Block<P>::place(s)); });
  }

  // What has been attended to, from the exchange to shared memory.
  __device__ void receive_attended(int l) const {
    constexpr int kChunks = P::kAttended / 8, kSteps = P::steps(kChunks);
    uint4 x[kSteps];
    receive_row<kChunks>(x, block.template exchange<const uint4>(l, Exchange::kAttended));
    Block<P>::sync_multiplying();  // nobody needs what lies there
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (Block<P>::place(s) >= kChunks) break;
      put_chunk(Block<P>::place(s), x[s]);
    }
    Block<P>::sync_multiplying();
  }

  // The SwiGLUs of all chosen experts likewise, each with its own scale. Whatever other blocks did before they sent theirs
  // is behind us from here on (load_in_order): see Finish::clear.
  __device__ void receive_swiglus(int l) const {
    constexpr int kChunks = P::kInner / 8, kPadded = P::kInnerChunks;
    constexpr int kSteps = P::steps(kChosen * kPadded), kRowWarps = kPadded / 32;
    constexpr bool kIsEven = kSteps * P::kMultiplying == kChosen * kPadded;
    auto row_of = [](int s) { return Block<P>::place(s) / kPadded; };
    auto chunk_of = [](int s) { return Block<P>::place(s) % kPadded; };
    const uint4* rows = block.template exchange<const uint4>(l, Exchange::kAct);
    uint4 x[kSteps];
    Block<P>::receive(x, [&](int s) { return (kIsEven || row_of(s) < kChosen) && chunk_of(s) < kChunks; },
                      [&](int s) { return load_in_order(rows + row_of(s) * kChunks + chunk_of(s)); });
    // All chunks of a warp in a step are of one row.
    static_assert(kPadded % 32 == 0);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) keep_largest(s * P::kWarps + warp, x[s]);
    Block<P>::sync_multiplying();  // nobody needs what lies there
    uint32_t largest[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) largest[s] = largest_of<kRowWarps>(min(row_of(s), kChosen - 1) * kRowWarps);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int row = row_of(s);
      if (!kIsEven && row >= kChosen) break;
      const TokenScale token(largest[s]);
      if (chunk_of(s) == 0) block.small.down_factors[row] = token.factor;
      put_split(block.activations(), Block<P>::place(s), x[s], token.scale);
    }
    fence_proxy_async();
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
    turn.next_stage(), turn.next_part();
  }

  // Where this team's items of a phase begin among the block's.
  __device__ int first_own() const { return (team + item) % kTeams; }

  template <int kRows, int kColumns>
  __device__ void multiply_rows(int count) {
    using Rows = RowProduct<kColumns, P::kTeamWarps>;
    const Rows rows = Rows::of(block.activations(), team_warp);
    for (int i = first_own(); i < count; i += kTeams) {
      take([&](const uint8_t* stage) { return rows.template multiply<kRows>(stage, team_warp); }, put_rows);
    }
    item += count;
  }

  // Items of gate_up: `first` is that of the block among all of the phase. Of down: `first` is -1. One code for both where
  // their columns are as many: instructions that are in the cache already.
  template <int kColumns>
  __device__ void multiply_experts(int first, int count) {
    const bool is_up = first >= 0;
    const uint32_t activations = shared_address(block.activations());
#pragma unroll 1
    for (int i = first_own(); i < count; i += kTeams) {
      // Of gate_up both tiles have the token; of down, the two experts of an item have one each.
      const float* factors = is_up ? &block.small.up_factor : block.small.down_factors + i % (kChosen / 2) * 2;
      const uint32_t tokens = activations + (is_up ? 0 : i % (kChosen / 2) * 4 * P::padded(kColumns));
      take(
          [&](const uint8_t* stage) {
            return TileProduct<P, kColumns>(stage, block.small.tables, tokens, factors, !is_up, team_warp);
          },
          [&](float* parts, const auto& product) { product.put(parts, team_warp); });
    }
    item += count;
  }

  __device__ void begin_down(int l) const {
    block.mark(l, kUpDone);
    receive_swiglus(l);
    block.mark(l, kUpThere);
  }

  __device__ void run() {
    const AttentionInput input(block.call);
    input.keep_turns(block.small);
    for (int l = 0; l < block.call.num_layers; ++l) {
      const Layer& layer = block.small.layers[l];
      block.mark(l, kBegun);
      {
        const Norm norm(layer.attention_norm);
        const auto* stream = l > 0 ? block.template exchange<const uint4>(l - 1, Exchange::kEnd)
                                   : reinterpret_cast<const uint4*>(block.call.residual);
        normalise(norm, stream, l > 0, [&](int i, const uint4& x) { put_chunk(Block<P>::place(i), x); }, [] {});
      }
      block.mark(l, kNormed);
      multiply_rows<P::kQkvItemRows, P::kHidden>(Block<P>::qkv_items().size());
      block.mark(l, kQkvDone);
      {
        const Attention<P> attention(block, l, input);
        auto take_units = [&](auto use) {
          const int count = attention.history.items();
#pragma unroll 1
          for (int i = first_own(); i < count; i += kTeams) {
            mbarrier_wait(block.full(turn.stage), turn.parity);
            use(block.stage(turn.stage), i * P::kItemUnits, team_warp);
            __syncwarp();
            mbarrier_arrive_warp(block.empty(turn.stage), lane);
            turn.next_stage();
          }
          item += count;
        };
        if (attention.is_active()) attention.run(take_units);
      }
      block.mark(l, kAttentionDone);
      receive_attended(l);
      block.mark(l, kAttentionThere);
      multiply_rows<P::kOutItemRows, P::kAttended>(P::kOutItems);
      block.mark(l, kOutDone);
      {
        const Norm norm(layer.expert_norm);
        Router<P> router(block, layer);
        uint4 token[Norm::kSteps] = {};
        auto take = [&](int i, const uint4& x) { token[i] = x, router.add(i, x); };
        auto keep = [&] {
#pragma unroll
          for (int i = 0; i < Norm::kSteps; ++i) keep_largest(i * P::kWarps + warp, token[i]);
          router.keep();
        };
        normalise(norm, block.template exchange<const uint4>(l, Exchange::kMiddle), true, take, keep);
        block.mark(l, kNormedAgain);
        if (warp == 0) router.send(l);
        put_token(token);  // while logits are on their way
        if (warp == 0) router.choose(l);
      }
      mbarrier_wait(shared_address(&block.small.routed), l & 1);
      block.mark(l, kRouted);
      if constexpr (P::kHidden == P::kInner) {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          if (half == 1) begin_down(l);
          multiply_experts<P::kHidden>(half == 0 ? Block<P>::up_items().begin : -1,
                                       half == 0 ? Block<P>::up_items().size() : P::kDownItems);
        }
      } else {
        multiply_experts<P::kHidden>(Block<P>::up_items().begin, Block<P>::up_items().size());
        begin_down(l);
        multiply_experts<P::kInner>(-1, P::kDownItems);
      }
      block.mark(l, kDownDone);
    }
  }
};

// Grid: P::kBlocks blocks, all resident at once; they wait for each other.
template <class P>
__global__ void __launch_bounds__(P::kThreads, 1) layers_kernel(const __grid_constant__ Call call) {
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
    mbarrier_init_fence();
  }
  store_tables(small.tables);
  __syncthreads();
  if (warp >= P::kWarps) {
    registers_shrink<P::kOtherRegisters>();
    if (warp == P::kWarps + kTeams) {
      // Waits by itself for the kernel before: weights were there before any step began.
      if (lane == 0) Ring<P>{block}.run();
    } else if (warp < P::kWarps + kTeams) {
      moe_decode::wait_for_kernel_before();
      block.count_layers();
      Finish<P>{block, warp - P::kWarps, lane}.run();
    }
  } else {
    registers_grow<P::kMultiplyRegisters>();
    moe_decode::wait_for_kernel_before();
    moe_decode::let_next_kernel_start();
    block.count_layers();
    Multiply<P>{block}.run();
  }
  // Nobody of this launch asks for it any more: all have sent something that this block has received.
  __syncthreads();
  if (threadIdx.x == 0) add_one(block.launches());
}

}  // namespace rose::layers
