// The warp of each team that adds up the parts of an item and writes the result: projections, SwiGLU, the residual
// stream.
//
// Biases it asks for several items ahead: a load takes longer than the product of an item, and the teams wait for their
// parts to be taken away. The rows of the residual stream that this block owns stay in shared memory.
#pragma once

#include "layers_history.cuh"

namespace rose::layers {

template <class P>
struct Finish {
  using Exchange = typename P::Exchange;

  Block<P>& block;
  int team, lane;
  Turn<P> turn{team};
  int item = 0;  // of the block, at the begin of the phase
  const int length = *block.call.length;

  // A lane has a row of an item; the second half of the lanes has the rows of the first once more and writes nothing.
  __device__ int row() const { return lane & 15; }
  __device__ bool is_first() const { return lane < 16; }

  // Items of a team, where so many are shared out to so many blocks.
  __host__ __device__ static constexpr int most(int items, int blocks) {
    return ((items + blocks - 1) / blocks + kTeams - 1) / kTeams;
  }

  // Of all threads that finish.
  __device__ int place() const { return team * 32 + lane; }
  __device__ static void sync() { named_sync(kFinishBarrier, kTeams * 32); }

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
        turn.next_part();
        write(own, sum, known[a]);
      }
    }
    item += count;
  }

  __device__ void finish_qkv(const Layer& layer, int l) {
    const Share share = Block<P>::qkv_items();
    const int mine = min(row(), P::kQkvItemRows - 1);
    uint32_t* qkv = block.template exchange<uint32_t>(l, Exchange::kQkv);
    auto row_of = [&](int i) { return Block<P>::qkv_row(share.begin + i) + mine; };
    finish<most(P::kQkvItems, P::kSplit)>(
        share.size(), [&](int i) { return __ldg(layer.qkv_bias + row_of(i)); },
        [&](int i, float v, __nv_bfloat16 bias) {
          const float sum = v + __bfloat162float(bias), next = shuffle_xor(sum, 1);
          if (!is_first() || row() >= P::kQkvItemRows || row() % 2 == 1) return;
          store_for_all(qkv + row_of(i) / 2, pack_bf16(sum, next));
        });
  }

  __device__ void finish_out(const Layer& layer, int l) {
    const int mine = min(row(), P::kOutItemRows - 1), first = Block<P>::first_row() + mine;
    item += History<P>(block.call, layer, length).items();  // from which there is nothing to finish
    sync();  // the layer before has left its rows of the stream
    finish<most(P::kOutItems, 1)>(
        P::kOutItems, [&](int i) { return __ldg(layer.out_bias + first + i * P::kOutItemRows); },
        [&](int i, float v, __nv_bfloat16 bias) {
          if (!is_first() || row() >= P::kOutItemRows) return;
          float& stream = block.small.stream[i * P::kOutItemRows + mine];
          stream = rounded(stream + rounded(v + __bfloat162float(bias)));
        });
    sync();
    if (place() >= P::kOwnRows / 2) return;
    const float* stream = block.small.stream + place() * 2;
    uint32_t* middle = block.template exchange<uint32_t>(l, Exchange::kMiddle) + Block<P>::first_row() / 2;
    store_for_all(middle + place(), pack_bf16(stream[0], stream[1]));
  }

  // Empties what this block owns in the exchange of the layer before (of the launch before in the first layer, which has
  // read everything), while the router is awaited. All blocks have read it: this one has multiplied `out`, so has
  // attention of all heads in this layer, which took qkv of all blocks, and who sent that had read the end of the layer
  // before and whatever came before it. Who writes there next, or asks there, has received SwiGLUs of this layer from all
  // blocks first, which their finishers send behind their fences.
  __device__ void clear(int l) const {
    auto empty = [&](int at, int begin, int count) {
      uint32_t* words = block.template exchange<uint32_t>(l - 1, at) + begin;
      for (int i = place(); i < count; i += kTeams * 32) store_for_all(words + i, kEmpty);
    };
    const Share qkv = Block<P>::qkv_items(), up = Block<P>::up_items(), experts = Block<P>::experts();
    constexpr int kItemWords = P::kQkvItemRows / 2, kHeadWords = kHeadDim / 2, kUnitWords = kTileRows / 2;
    uint32_t* rows = block.template exchange<uint32_t>(l - 1, Exchange::kQkv);
    for (int i = place(); i < qkv.size() * kItemWords; i += kTeams * 32) {
      store_for_all(rows + Block<P>::qkv_row(qkv.begin + i / kItemWords) / 2 + i % kItemWords, kEmpty);
    }
    // Whoever has attended: heads are shared out here as where blocks add up.
    for (int head = Block<P>::part(); head < kGroup; head += P::kSplit) {
      empty(Exchange::kAttended, (Block<P>::kv_head() * kGroup + head) * kHeadWords, kHeadWords);
    }
    constexpr int kPartWords = kGroup * P::kHeadPart;
    empty(Exchange::kHeadParts, blockIdx.x * kPartWords, kPartWords);
    empty(Exchange::kMiddle, Block<P>::first_row() / 2, P::kOwnRows / 2);
    empty(Exchange::kLogits, experts.begin, experts.size());
    empty(Exchange::kAct, up.begin * kUnitWords, up.size() * kUnitWords);
    empty(Exchange::kEnd, Block<P>::first_row() / 2, P::kOwnRows / 2);
    __syncwarp();
    fence_for_all();
  }

  __device__ void finish_up(const Layer& layer, int l) {
    const Share share = Block<P>::up_items();
    uint32_t* act = block.template exchange<uint32_t>(l, Exchange::kAct);
    finish<most(kChosen * P::kUpItems, P::kBlocks)>(
        share.size(),
        [&](int i) {
          const int number = share.begin + i, unit = number % P::kUpItems;
          const size_t expert = block.small.chosen[number / P::kUpItems];
          return __ldg(layer.up_bias + expert * 2 * P::kInner + unit * 2 * kTileRows + row());
        },
        [&](int i, float v, __nv_bfloat16 bias) {
          const float mine = v + __bfloat162float(bias), other = shuffle_xor(mine, 1);
          const float limit = block.call.limit, gate = fminf(mine, limit), up = fminf(fmaxf(other, -limit), limit);
          const float a = gate / (1.0f + __expf(-block.call.alpha * gate)) * (up + 1.0f);
          const float next = shuffle_xor(a, 2);
          if (!is_first() || row() % 4 != 0) return;
          store_for_all(act + (share.begin + i) * (kTileRows / 2) + row() / 4, pack_bf16(a, next));
        });
  }

  // Outputs of the chosen experts for the rows that this block owns, then their sum: k = 0 first.
  __device__ void finish_down(const Layer& layer, int l) {
    auto& small = block.small;
    const int first = Block<P>::first_row();
    constexpr int kItemsEach = kChosen / 2;  // of a group of rows
    auto chosen_of = [&](int i) { return i % kItemsEach * 2 + (row() >> 3); };
    auto row_of = [&](int i) { return i / kItemsEach * kTileRows + (row() & 7); };
    finish<most(P::kDownItems, 1)>(
        P::kDownItems,
        [&](int i) {
          const size_t expert = small.chosen[chosen_of(i)];
          return __ldg(layer.down_bias + expert * P::kHidden + first + row_of(i));
        },
        [&](int i, float v, __nv_bfloat16 bias) {
          if (!is_first()) return;
          small.y[chosen_of(i)][row_of(i)] = v + __bfloat162float(bias);
        });
    sync();
    const int own = place();
    const bool is_here = own < P::kOwnRows;
    float sum = 0;
    if (is_here) {
      float total = 0;
#pragma unroll
      for (int k = 0; k < kChosen; ++k) total += small.weights[k] * small.y[k][own];
      sum = rounded(small.stream[own] + rounded(total));
      small.stream[own] = sum;
    }
    const float next = shuffle_xor(sum, 1);
    if (!is_here || own % 2 == 1) return;
    const bool is_last = l == block.call.num_layers - 1;
    uint32_t* stream = is_last ? reinterpret_cast<uint32_t*>(block.call.residual)
                               : block.template exchange<uint32_t>(l, Exchange::kEnd);
    store_for_all(stream + (first + own) / 2, pack_bf16(sum, next));
  }

  __device__ void run() {
    if (place() < P::kOwnRows) {
      block.small.stream[place()] = __bfloat162float(block.call.residual[Block<P>::first_row() + place()]);
    }
    for (int l = 0; l < block.call.num_layers; ++l) {
      const Layer& layer = block.small.layers[l];
      finish_qkv(layer, l);
      finish_out(layer, l);
      clear(l);
      mbarrier_wait(shared_address(&block.small.routed), l & 1);
      finish_up(layer, l);
      finish_down(layer, l);
    }
  }
};

}  // namespace rose::layers
