// Attention: a part of a kv head's history to each block, units of 16 tokens to each warp, out of the ring.
//
// Where a kv head has several blocks, each has a head or two for which it adds up the parts of all, in their order. The
// new token and the sink are no part of the history: they are added then, once. The new k and v are written to their
// page for later steps; this step takes them from the projection.
#pragma once

#include "layers_history.cuh"

namespace rose::layers {

using moe_decode::mma;
using moe_decode::word;

constexpr float kLog2E = 1.4426950408889634f;

// What is the same in all layers: the token's place.
struct AttentionInput {
  int length;
  int64_t slots[2];
  const float* turn;

  __device__ explicit AttentionInput(const Call& call) {
    length = *call.length;
    slots[0] = *call.slots[0], slots[1] = *call.slots[1];
    turn = call.cos_sin + *call.position * kHeadDim;
  }

  // Barriers of the first layer make them seen.
  template <class Small>
  __device__ void keep_turns(Small& small) const {
    if (threadIdx.x < kHeadDim) small.turns[threadIdx.x] = turn[threadIdx.x];
  }
};

template <class P>
struct Attention {
  Block<P>& block;
  const Layer& layer;
  const AttentionInput& input;
  int number;  // of the layer
  int warp, lane;
  History<P> history;
  int kv_head, part;

  __device__ Attention(Block<P>& b, int layer_number, const AttentionInput& i)
      : block(b), layer(b.small.layers[layer_number]), input(i), number(layer_number), warp(threadIdx.x >> 5),
        lane(threadIdx.x & 31), history(b.call, layer, i.length), kv_head(history.kv_head), part(history.part) {}

  __device__ bool is_active() const { return history.is_active(); }

  // The projection of the kv head, to shared memory as soon as it is there.
  __device__ void receive_projected() const {
    constexpr int kHead = kHeadDim / 8, kAll = (kGroup + 2) * kHead;
    const uint4* qkv = block.template exchange<const uint4>(number, P::Exchange::kQkv);
    constexpr int kSteps = P::steps(kAll);
    uint4 x[kSteps];
    auto load = [&](int s) {
      const int i = Block<P>::place(s), head = i / kHead;
      const int row = head < kGroup    ? kv_head * kGroup + head
                      : head == kGroup ? P::kQueryHeads + kv_head
                                       : P::kQueryHeads + P::kKvHeads + kv_head;
      return load_shared_by_all(qkv + row * kHead + i % kHead);
    };
    Block<P>::receive(x, [](int s) { return Block<P>::place(s) < kAll; }, load);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (Block<P>::place(s) < kAll) block.small.qkv[Block<P>::place(s)] = x[s];
    }
    Block<P>::sync_multiplying();
  }

  // Of the projection: number d of head `head` of the group; kGroup is the key, kGroup + 1 the value.
  __device__ float projected(int head, int d) const {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(block.small.qkv)[head * kHeadDim + d]);
  }

  // The query of head g, turned: chunk t in q[0..3], chunk t + 4 in q[4..7].
  __device__ void turn_query(uint32_t (&q)[8]) const {
    const float* turn = block.small.turns + (lane & 3) * 8;
    const uint4* row = block.small.qkv + (lane >> 2) * (kHeadDim / 8) + (lane & 3);
    const uint4 first = row[0], second = row[kHeadDim / 16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 cos = *reinterpret_cast<const float2*>(turn + 2 * i);
      const float2 sin = *reinterpret_cast<const float2*>(turn + kHeadDim / 2 + 2 * i);
      const uint32_t a = word(first, i), b = word(second, i);
      q[i] = pack_bf16(low(a) * cos.x - low(b) * sin.x, high(a) * cos.y - high(b) * sin.y);
      q[i + 4] = pack_bf16(low(b) * cos.x + low(a) * sin.x, high(b) * cos.y + high(a) * sin.y);
    }
  }

  // A warp for each head of the group: the new token's score. The first part's first warp writes its k and v to their
  // page.
  __device__ void take_new_token() const {
    static_assert(P::kWarps >= kGroup || kGroup % P::kWarps == 0);
    const Call& c = block.call;
    if (warp >= kGroup) return;
    const float cos = block.small.turns[lane], sin = block.small.turns[lane + kHeadDim / 2];
    auto turned = [&](float x, float y) { return make_float2(rounded(x * cos - y * sin), rounded(y * cos + x * sin)); };
    const float2 k = turned(projected(kGroup, lane), projected(kGroup, lane + kHeadDim / 2));
#pragma unroll
    for (int head = warp; head < kGroup; head += P::kWarps) {
      const float2 q = turned(projected(head, lane), projected(head, lane + kHeadDim / 2));
      float score = q.x * k.x + q.y * k.y;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) score += shuffle_xor(score, d);
      if (lane == 0) block.small.new_score[head] = score;
    }
    const int64_t slot = input.slots[layer.has_window != 0];
    if (part == 0 && warp == 0 && slot >= 0) {
      __nv_bfloat16* to = history.key(slot / c.page_tokens, slot % c.page_tokens) + lane;
      to[0] = __float2bfloat16(k.x), to[kHeadDim / 2] = __float2bfloat16(k.y);
      to += history.to_values();
      to[0] = __float2bfloat16(projected(kGroup + 1, lane));
      to[kHeadDim / 2] = __float2bfloat16(projected(kGroup + 1, lane + kHeadDim / 2));
    }
  }

  struct State {
    float most = -INFINITY, total = 0;  // of head g: of all the warp's tokens, of this lane's
    float o[4][4] = {};  // o[j]: dims 8g + 2j (0, 1) and 8g + 2j + 1 (2, 3) of heads 2t and 2t + 1
  };

  // Unit `unit_number`, of which `keys` are in shared memory, [kUnit][kHeadDim], and its values behind them. This lane has
  // of k chunks t and t + 4 of rows g and g + 8, of v chunk g of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  __device__ void attend(State& s, const uint32_t (&q)[8], const uint8_t* keys, int unit_number, float scale) const {
    constexpr int kRow = kHeadDim * 2;
    const int g = lane >> 2, t = lane & 3;
    float score[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint4 k = *reinterpret_cast<const uint4*>(keys + (i * 8 + g) * kRow + (t + 4 * c) * 16);
        mma(score[i], q[4 * c], 0, q[4 * c + 1], 0, k.x, k.y);
        mma(score[i], q[4 * c + 2], 0, q[4 * c + 3], 0, k.z, k.w);
      }
    }
    float most = s.most;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int place = unit_number * kUnit + i * 8 + 2 * t + c;
        const bool is_seen = place >= history.first && place < input.length - 1;
        score[i][c] = is_seen ? score[i][c] * scale : -INFINITY;
        most = fmaxf(most, score[i][c]);
      }
    }
    most = fmaxf(most, shuffle_xor(most, 1));
    most = fmaxf(most, shuffle_xor(most, 2));
    // A unit has a token that is seen, so that `most` is a number.
    const float shrink = exp2_fast(s.most - most);
    s.most = most;
    float p[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) p[i][c] = exp2_fast(score[i][c] - most);
    }
    s.total = s.total * shrink + ((p[0][0] + p[0][1]) + (p[1][0] + p[1][1]));
    const float shrink_even = shuffle(shrink, 8 * t), shrink_odd = shuffle(shrink, 8 * t + 4);
    const uint32_t b0 = pack_bf16(p[0][0], p[0][1]), b1 = pack_bf16(p[1][0], p[1][1]);
    const uint8_t* values = keys + P::kUnitBytes + g * 16;
    const int start = unit_number * kUnit;
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // For a token that is not seen a value that is: its share is zero, and zero times what a page may hold beside the
      // history is no zero where that is no number.
      const int row = 2 * t + (j & 1) + (j >> 1) * 8;
      const int seen = min(max(row, history.first - start), input.length - 2 - start);
      v[j] = *reinterpret_cast<const uint4*>(values + seen * kRow);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s.o[j][0] *= shrink_even, s.o[j][1] *= shrink_odd, s.o[j][2] *= shrink_even, s.o[j][3] *= shrink_odd;
      const uint32_t v0 = word(v[0], j), v1 = word(v[1], j), v2 = word(v[2], j), v3 = word(v[3], j);
      mma(s.o[j], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
          __byte_perm(v2, v3, 0x7632), b0, b1);
    }
  }

  // Scratch of parts, each of a pair of warps: o [pairs][kGroup][kHeadDim], then most and total [pairs][kGroup].
  static constexpr int kPairs = P::kWarps / 2;
  __device__ float* scratch() const { return reinterpret_cast<float*>(block.activations()); }
  __device__ float* scratch_most() const { return scratch() + kPairs * kGroup * kHeadDim; }
  __device__ float* scratch_total() const { return scratch_most() + kPairs * kGroup; }
  // Of this lane's o[j][i] and o[j][i + 2] in the scratch of a pair.
  __device__ float2* scratch_o(int pair, int j, int i) const {
    const int g = lane >> 2, t = lane & 3;
    return reinterpret_cast<float2*>(scratch() + (pair * kGroup + 2 * t + i) * kHeadDim + 8 * g + 2 * j);
  }

  __device__ void keep(const State& s, int pair) const {
    const int g = lane >> 2, t = lane & 3;
    float total = s.total + shuffle_xor(s.total, 1);
    total += shuffle_xor(total, 2);
    if (t == 0) scratch_most()[pair * kGroup + g] = s.most, scratch_total()[pair * kGroup + g] = total;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) *scratch_o(pair, j, i) = make_float2(s.o[j][i], s.o[j][i + 2]);
    }
  }

  // How much of two parts counts in their sum, by the largest score of each.
  struct Shares {
    float most, mine, its;
    __device__ Shares(float my_most, float its_most) : most(fmaxf(my_most, its_most)) {
      const float base = most == -INFINITY ? 0 : most;  // no part has a token
      mine = exp2_fast(my_most - base), its = exp2_fast(its_most - base);
    }
  };

  // The second half of the warps hands its parts to the first, which keeps the sums.
  __device__ void keep_pairs(State& s) const {
    if (warp >= kPairs) keep(s, warp - kPairs);
    Block<P>::sync_multiplying();
    if (warp < kPairs) {
      const int g = lane >> 2, t = lane & 3;
      const Shares shares(s.most, scratch_most()[warp * kGroup + g]);
      s.most = shares.most;
      s.total = s.total * shares.mine + (t == 0 ? scratch_total()[warp * kGroup + g] * shares.its : 0.0f);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float mine = shuffle(shares.mine, 8 * t + 4 * i), its = shuffle(shares.its, 8 * t + 4 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 o = *scratch_o(warp, j, i);
          s.o[j][i] = s.o[j][i] * mine + o.x * its, s.o[j][i + 2] = s.o[j][i + 2] * mine + o.y * its;
        }
      }
      __syncwarp();
      keep(s, warp);
    }
    Block<P>::sync_multiplying();
  }

  // A head's number of a thread's: all of a block's threads have one each, or several.
  static constexpr int kEach = kGroup * kHeadDim / P::kMultiplying;
  static_assert(kGroup * kHeadDim % P::kMultiplying == 0);

  struct Sum {
    float o = 0, most = -INFINITY, total = 0;

    // Another part: what it has for the same head.
    __device__ void add(float its_o, float its_most, float its_total) {
      const Shares shares(most, its_most);
      o = o * shares.mine + its_o * shares.its, total = total * shares.mine + its_total * shares.its;
      most = shares.most;
    }
  };

  __device__ Sum add_pairs(int head, int d) const {
    Sum sum;
#pragma unroll
    for (int w = 0; w < kPairs; ++w) sum.most = fmaxf(sum.most, scratch_most()[w * kGroup + head]);
    if (sum.most == -INFINITY) return sum;
#pragma unroll 4
    for (int w = 0; w < kPairs; ++w) {
      const float share = exp2_fast(scratch_most()[w * kGroup + head] - sum.most);
      sum.o += share * scratch()[(w * kGroup + head) * kHeadDim + d];
      sum.total += share * scratch_total()[w * kGroup + head];
    }
    return sum;
  }

  // The new token and the sink, and the result. All lanes of a warp, of one head and neighbouring d.
  __device__ void complete(Sum sum, int head, int d, float scale) const {
    const float sink = block.small.sinks[head];
    const float fresh = block.small.new_score[head] * scale, most = fmaxf(fmaxf(sink, fresh), sum.most);
    const float share = exp2_fast(sum.most - most), p = exp2_fast(fresh - most);
    const float o = sum.o * share + rounded(p) * projected(kGroup + 1, d);
    const float total = sum.total * share + p + exp2_fast(sink - most);
    const float mine = input.length > 0 ? o / total : 0.0f, next = shuffle_xor(mine, 1);
    if (d % 2 == 1) return;
    uint32_t* attended = block.template exchange<uint32_t>(number, P::Exchange::kAttended);
    store_for_all(attended + ((kv_head * kGroup + head) * kHeadDim + d) / 2, pack_bf16(mine, next));
  }

  // This block's part of all heads, for the blocks that add them up.
  __device__ void hand_over() const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = j * P::kMultiplying + threadIdx.x, head = i / kHeadDim, d = i % kHeadDim;
      const Sum sum = add_pairs(head, d);
      auto* to = reinterpret_cast<uint32_t*>(block.head_part(number, blockIdx.x) + head * P::kHeadPart);
      store_for_all(to + d, __float_as_uint(sum.o));
      if (d != 0) continue;
      store_for_all(to + kHeadDim, __float_as_uint(sum.most));
      store_for_all(to + kHeadDim + 1, __float_as_uint(sum.total));
    }
  }

  // A number of a block's part; its largest score and sum of weights.
  struct Part {
    uint32_t o;
    uint2 sums;
    __device__ friend bool is_written(const Part& p) { return layers::is_written(p.o) && layers::is_written(p.sums); }
  };

  // The heads that this block adds up: threads of a slice have a number each, of some of the parts; then the first slice
  // adds up the slices.
  static constexpr int kSlices = P::kSlices, kSliceParts = (P::kSplit + kSlices - 1) / kSlices;
  __device__ void add_blocks(float scale) const {
    const int d = threadIdx.x % kHeadDim, slice = threadIdx.x / kHeadDim;
    float* slices = scratch() + kPairs * kGroup * P::kHeadPart;
    for (int head = part; head < kGroup; head += P::kSplit) {
      Part parts[kSliceParts];
      auto is_wanted = [&](int i) { return slice * kSliceParts + i < P::kSplit; };
      auto load = [&](int i) {
        const int number_of_part = kv_head * P::kSplit + slice * kSliceParts + i;
        const float* from = block.head_part(number, number_of_part) + head * P::kHeadPart;
        return Part{load_shared_by_all(reinterpret_cast<const uint32_t*>(from + d)),
                    load_shared_by_all(reinterpret_cast<const uint2*>(from + kHeadDim))};
      };
      Block<P>::receive(parts, is_wanted, load);
      Sum sum;
#pragma unroll
      for (int i = 0; i < kSliceParts; ++i) {
        const Part& its = parts[i];
        if (is_wanted(i)) sum.add(__uint_as_float(its.o), __uint_as_float(its.sums.x), __uint_as_float(its.sums.y));
      }
      float* mine = slices + slice * P::kHeadPart;
      mine[d] = sum.o;
      if (d == 0) mine[kHeadDim] = sum.most, mine[kHeadDim + 1] = sum.total;
      Block<P>::sync_multiplying();
      if (slice == 0) {
#pragma unroll
        for (int i = 1; i < kSlices; ++i) {
          const float* its = slices + i * P::kHeadPart;
          sum.add(its[d], its[kHeadDim], its[kHeadDim + 1]);
        }
        complete(sum, head, d, scale);
      }
      Block<P>::sync_multiplying();
    }
  }

  // All warps that multiply. `take_units` hands this warp's team its items: stage, first unit of the item, and which of the
  // team's warps this is.
  template <class TakeUnits>
  __device__ void run(TakeUnits take_units) const {
    if (threadIdx.x < kGroup) {
      block.small.sinks[threadIdx.x] = __ldg(layer.sinks + kv_head * kGroup + threadIdx.x) * kLog2E;
    }
    receive_projected();
    block.mark(number, kQkvThere);
    uint32_t q[8];
    turn_query(q);
    take_new_token();
    const float scale = rsqrtf(static_cast<float>(kHeadDim)) * kLog2E;
    State state;
    take_units([&](const uint8_t* stage, int first, int team_warp) {
      const int unit = history.begin + first + team_warp;
      if (team_warp < P::kItemUnits && unit < history.end) {
        attend(state, q, stage + team_warp * 2 * P::kUnitBytes, unit, scale);
      }
    });
    keep_pairs(state);
    if (history.num_parts > 1) {
      hand_over();
      add_blocks(scale);
      return;
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = j * P::kMultiplying + threadIdx.x, head = i / kHeadDim, d = i % kHeadDim;
      complete(add_pairs(head, d), head, d, scale);
    }
  }
};

}  // namespace rose::layers
