// The warp of each team that adds up the parts of an item and writes the result: projections, SwiGLU, the residual
// stream.
//
// Whatever else it needs from memory (biases, the residual stream) it asks for several items ahead: a load takes longer
// than the product of an item, and the teams wait for their parts to be taken away.
#pragma once

#include "layers_block.cuh"

namespace rose::layers {

template <class P>
struct Finish {
  Block<P>& block;
  int team, lane;
  Turn<P> turn{team};
  int item = 0;  // of the block, at the begin of the phase

  // A lane has a row of an item; the second half of the lanes has the rows of the first once more and writes nothing.
  __device__ int row() const { return lane & 15; }
  __device__ bool is_first() const { return lane < 16; }

  __device__ void arrive(Phase phase) const {
    __syncwarp();
    if (lane == 0) block.arrive_for_all(phase, 1);
  }

  // This team's of `count` items: `read(i)` is called ahead, for kAhead items at a time; then `write(i, sum, known)` by
  // all lanes, in order.
  template <int kAhead, class Read, class Write>
  __device__ void finish(int count, Read read, Write write) {
    for (int i = (team + item) % kTeams; i < count; i += kAhead * kTeams) {
      decltype(read(0)) known[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) known[a] = read(min(i + a * kTeams, count - 1));
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int own = i + a * kTeams;
        if (own >= count) break;
        mbarrier_wait(block.part_full(team, turn.buffer), turn.part_parity);
        const float* parts = block.parts(team, turn.buffer) + row();
        float sum = parts[0];
#pragma unroll
        for (int w = 1; w < P::kTeamWarps; ++w) sum += parts[w * 16];
        __syncwarp();
        mbarrier_arrive_warp(block.part_empty(team, turn.buffer), lane);
        turn.next();
        write(own, sum, known[a]);
      }
    }
    item += count;
  }

  __device__ void finish_qkv(const Layer& layer) {
    const Share share = Block<P>::qkv_items();
    const int first = share.begin * P::kQkvItemRows + min(row(), P::kQkvItemRows - 1);
    const bool is_here = is_first() && row() < P::kQkvItemRows;
    finish<most<P::kQkvItems>()>(
        share.size(), [&](int i) { return __ldg(layer.qkv_bias + first + i * P::kQkvItemRows); },
        [&](int i, float v, __nv_bfloat16 bias) {
          if (!is_here) return;
          block.qkv()[first + i * P::kQkvItemRows] = __float2bfloat16(v + __bfloat162float(bias));
        });
    arrive(kQkv);
  }

  __device__ void finish_out(const Layer& layer) {
    struct Known {
      __nv_bfloat16 bias;
      float residual;
    };
    const Share share = Block<P>::out_items();
    const int first = share.begin * P::kOutItemRows + min(row(), P::kOutItemRows - 1);
    const bool is_here = is_first() && row() < P::kOutItemRows;
    __nv_bfloat16* stream = block.call.residual + first;
    // HAZARD: the residual stream is read without waiting for its writers. They are done: this warp has finished items
    // of qkv, which waited for them.
    finish<most<P::kOutItems>()>(
        share.size(),
        [&](int i) {
          return Known{__ldg(layer.out_bias + first + i * P::kOutItemRows), load_bf16(stream + i * P::kOutItemRows)};
        },
        [&](int i, float v, const Known& known) {
          if (!is_here) return;
          stream[i * P::kOutItemRows] = __float2bfloat16(known.residual + rounded(v + __bfloat162float(known.bias)));
        });
    arrive(kOut);
  }

  __device__ void finish_up(const Layer& layer) {
    const Share share = Block<P>::up_items();
    finish<most<kChosen * P::kUpItems>()>(
        share.size(),
        [&](int i) {
          const int number = share.begin + i, unit = number % P::kUpItems;
          const size_t expert = block.small.chosen[number / P::kUpItems];
          return __ldg(layer.up_bias + expert * 2 * P::kInner + unit * 2 * kTileRows + row());
        },
        [&](int i, float v, __nv_bfloat16 bias) {
          const int number = share.begin + i, k = number / P::kUpItems, unit = number % P::kUpItems;
          const float mine = v * moe_decode::kCodeScale + __bfloat162float(bias), other = shuffle_xor(mine, 1);
          if (!is_first() || row() % 2 == 1) return;
          const float limit = block.call.limit, gate = fminf(mine, limit), up = fminf(fmaxf(other, -limit), limit);
          const float a = gate / (1.0f + __expf(-block.call.alpha * gate)) * (up + 1.0f);
          block.act()[k * P::kInner + unit * kTileRows + row() / 2] = __float2bfloat16(a);
        });
    arrive(kUp);
  }

  // Outputs of the chosen experts for the rows that this block owns, then their sum: k = 0 first.
  __device__ void finish_down(const Layer& layer) {
    auto& small = block.small;
    const Share groups = Block<P>::down_groups();
    const int place = team * 32 + lane, rows = groups.size() * kTileRows;
    static_assert(P::kMostRows <= kTeams * 32);
    __nv_bfloat16* stream = block.call.residual + groups.begin * kTileRows + place;
    // HAZARD: the residual stream is read ahead of the last items. Its writers (the phase of out) are done: this warp
    // has finished items of gate_up, which waited for them.
    const float residual = place < rows ? load_bf16(stream) : 0.0f;
    constexpr int kItemsEach = kChosen / 2;  // of a group of rows
    auto chosen_of = [&](int i) { return i % kItemsEach * 2 + (row() >> 3); };
    auto row_of = [&](int i) { return i / kItemsEach * kTileRows + (row() & 7); };
    finish<(P::kMostGroups * kItemsEach + kTeams - 1) / kTeams>(
        Block<P>::down_items(),
        [&](int i) {
          const size_t expert = small.chosen[chosen_of(i)];
          return __ldg(layer.down_bias + expert * P::kHidden + groups.begin * kTileRows + row_of(i));
        },
        [&](int i, float v, __nv_bfloat16 bias) {
          if (is_first()) small.y[chosen_of(i)][row_of(i)] = v * moe_decode::kCodeScale + __bfloat162float(bias);
        });
    named_sync(kFinishBarrier, kTeams * 32);
    if (place < rows) {
      float total = 0;
#pragma unroll
      for (int k = 0; k < kChosen; ++k) total += small.weights[k] * small.y[k][place];
      *stream = __float2bfloat16(residual + rounded(total));
    }
    arrive(kDown);
  }

  __device__ void run() {
    for (int l = 0; l < block.call.num_layers; ++l) {
      const Layer& layer = block.small.layers[l];
      finish_qkv(layer);
      finish_out(layer);
      mbarrier_wait(shared_address(&block.small.routed), l & 1);
      finish_up(layer);
      finish_down(layer);
    }
  }

 private:
  // Items of a team in a phase of so many in all.
  template <int kItems>
  __host__ __device__ static constexpr int most() {
    return ((kItems + P::kBlocks - 1) / P::kBlocks + kTeams - 1) / kTeams;
  }
};

}  // namespace rose::layers
