// Attention: a part of a kv head's history to each block, units of 16 tokens to each warp, straight from memory
// into the fragments of the products.
//
// The last block of a kv head to be done adds up the parts, in their order. The new token and the
// sink are no part of the history: they are added then, once. The new k and v are written to their page for later
// steps; this step takes them from the projection.
#pragma once

#include "layers_block.cuh"

namespace rose::layers {

using moe_decode::mma;
using moe_decode::word;

constexpr int kUnit = 16;
constexpr int kAhead = 4;  // units of a warp that are on their way into the L2 cache
constexpr float kLog2E = 1.4426950408889634f;

// What is the same in all layers: which kv head this block works for, and the token's place.
template <class P>
struct AttentionInput {
  int kv_head, length = 0;
  int64_t slots[2] = {-1, -1};
  const float* turn;

  __device__ explicit AttentionInput(const Call& call) {
    kv_head = blockIdx.x / P::kSplit;
    if (!is_active()) return;
    length = *call.length;
    slots[0] = *call.slots[0], slots[1] = *call.slots[1];
    turn = call.cos_sin + *call.position * kHeadDim;
  }

  // Whether this block has one.
  __device__ bool is_active() const { return kv_head < P::kKvHeads; }

  // Barriers of the first layer make them seen.
  template <class Small>
  __device__ void keep_turns(Small& small) const {
    if (is_active() && threadIdx.x < kHeadDim) small.turns[threadIdx.x] = turn[threadIdx.x];
  }
};

template <class P>
struct Attention {
  Block<P>& block;
  const Layer& layer;
  const AttentionInput<P>& input;
  int warp, lane;
  int part, num_parts;  // of its kv head
  int begin, end, first;  // units [begin, end) of this block; tokens from `first` on are seen
  const int* table;
  bool has_window;

  // Unit of 16 tokens. k: chunks t and t + 4 of rows g and g + 8; v: chunk g of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  struct Unit {
    uint4 k[2][2], v[4];
  };

  __device__ Attention(Block<P>& b, const Layer& l, const AttentionInput<P>& i)
      : block(b), layer(l), input(i), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), part(blockIdx.x % P::kSplit) {
    has_window = l.has_window != 0;
    num_parts = has_window ? 1 : P::kSplit;
    const Call& c = b.call;
    table = c.tables[has_window];
    first = has_window ? max(input.length - c.window_tokens, 0) : 0;
    // A window of one token has no history, and no unit: it would be one without a token that is seen.
    const int seen = input.length - 1, first_unit = first / kUnit;
    const int units = first < seen ? (seen + kUnit - 1) / kUnit - first_unit : 0;
    begin = first_unit + units * part / num_parts, end = first_unit + units * (part + 1) / num_parts;
  }

  __device__ bool is_active() const { return input.is_active() && part < num_parts; }

  // Lane i: a row of k and one of v, 128 bytes each.
  __device__ void prefetch_unit(int number) const {
    const int page_tokens = block.call.page_tokens, start = number * kUnit;
    const size_t head = static_cast<size_t>(table[start / page_tokens]) * 2 * P::kKvHeads + input.kv_head;
    const __nv_bfloat16* rows = layer.kv + (head + (lane >> 4) * P::kKvHeads) * page_tokens * kHeadDim;
    prefetch_line(rows + (start % page_tokens + (lane & 15)) * kHeadDim);
  }

  __device__ void load(Unit& unit, int number) const {
    const int page_tokens = block.call.page_tokens, start = number * kUnit;
    const int page = table[start / page_tokens], g = lane >> 2, t = lane & 3;
    const __nv_bfloat16* k = layer.kv + (static_cast<size_t>(page) * 2 * P::kKvHeads + input.kv_head) * page_tokens * kHeadDim +
                             start % page_tokens * kHeadDim;
    const __nv_bfloat16* v = k + static_cast<size_t>(P::kKvHeads) * page_tokens * kHeadDim;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        unit.k[i][c] = __ldcg(reinterpret_cast<const uint4*>(k + (i * 8 + g) * kHeadDim + (t + 4 * c) * 8));
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // For a token that is not seen a value that is: its share is zero, and zero times what a page may hold beside the
      // history is no zero where that is no number.
      const int row = min(max(2 * t + (j & 1) + (j >> 1) * 8, first - start), input.length - 2 - start);
      unit.v[j] = __ldcg(reinterpret_cast<const uint4*>(v + row * kHeadDim + g * 8));
    }
  }

  // Head `number` of the projection: queries, then keys, then values.
  __device__ const __nv_bfloat16* projected(int number) const {
    return block.qkv() + number * kHeadDim;
  }

  // What a thread needs of the projection, asked for at once.
  struct Projected {
    uint4 q[2];          // of head g: chunks t and t + 4
    float own_q[2], k[2], v[2];  // of head `warp`, and the new token's: numbers `lane` and `lane` + 32
    float completed_v;   // number thread % kHeadDim
  };

  __device__ Projected load_projected() const {
    const int g = lane >> 2, t = lane & 3;
    const __nv_bfloat16* row = projected(input.kv_head * kGroup + g) + t * 8;
    const __nv_bfloat16* own_q = projected(input.kv_head * kGroup + warp % kGroup) + lane;
    const __nv_bfloat16* k = projected(P::kQueryHeads + input.kv_head);
    const __nv_bfloat16* v = k + P::kKvHeads * kHeadDim;
    Projected p;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      p.q[i] = __ldcg(reinterpret_cast<const uint4*>(row + i * kHeadDim / 2));
      p.own_q[i] = load_bf16(own_q + i * kHeadDim / 2);
      p.k[i] = load_bf16(k + lane + i * kHeadDim / 2), p.v[i] = load_bf16(v + lane + i * kHeadDim / 2);
    }
    p.completed_v = load_bf16(v + threadIdx.x % kHeadDim);
    return p;
  }

  // The query of head g, turned: chunk t in q[0..3], chunk t + 4 in q[4..7].
  __device__ void turn_query(const Projected& p, uint32_t (&q)[8]) const {
    const float* turn = block.small.turns + (lane & 3) * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 cos = *reinterpret_cast<const float2*>(turn + 2 * i);
      const float2 sin = *reinterpret_cast<const float2*>(turn + kHeadDim / 2 + 2 * i);
      const uint32_t a = word(p.q[0], i), b = word(p.q[1], i);
      q[i] = pack_bf16(low(a) * cos.x - low(b) * sin.x, high(a) * cos.y - high(b) * sin.y);
      q[i + 4] = pack_bf16(low(b) * cos.x + low(a) * sin.x, high(b) * cos.y + high(a) * sin.y);
    }
  }

  // A warp for each head of the group: the new token's score. The first part's first warp writes its k and v to their
  // page.
  __device__ void take_new_token(const Projected& p) const {
    static_assert(P::kWarps >= kGroup || kGroup % P::kWarps == 0);
    const Call& c = block.call;
    if (warp >= kGroup) return;
    const float cos = block.small.turns[lane], sin = block.small.turns[lane + kHeadDim / 2];
    auto turned = [&](float x, float y) { return make_float2(rounded(x * cos - y * sin), rounded(y * cos + x * sin)); };
    const float2 k = turned(p.k[0], p.k[1]);
#pragma unroll
    for (int head = warp; head < kGroup; head += P::kWarps) {
      const __nv_bfloat16* row = projected(input.kv_head * kGroup + head) + lane;
      const float2 q = head == warp ? turned(p.own_q[0], p.own_q[1]) : turned(load_bf16(row), load_bf16(row + kHeadDim / 2));
      float score = q.x * k.x + q.y * k.y;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) score += shuffle_xor(score, d);
      if (lane == 0) block.small.new_score[head] = score;
    }
    const int64_t slot = input.slots[has_window];
    if (part == 0 && warp == 0 && slot >= 0) {
      const int64_t page = slot / c.page_tokens;
      __nv_bfloat16* to =
          layer.kv + ((page * 2 * P::kKvHeads + input.kv_head) * c.page_tokens + slot % c.page_tokens) * kHeadDim + lane;
      to[0] = __float2bfloat16(k.x), to[kHeadDim / 2] = __float2bfloat16(k.y);
      to += static_cast<size_t>(P::kKvHeads) * c.page_tokens * kHeadDim;
      to[0] = __float2bfloat16(p.v[0]), to[kHeadDim / 2] = __float2bfloat16(p.v[1]);
    }
  }

  struct State {
    float most = -INFINITY, total = 0;  // of head g: of all the warp's tokens, of this lane's
    float o[4][4] = {};  // o[j]: dims 8g + 2j (0, 1) and 8g + 2j + 1 (2, 3) of heads 2t and 2t + 1
  };

  __device__ void attend(State& s, const uint32_t (&q)[8], const Unit& unit, int number, float scale) const {
    const int t = lane & 3;
    float score[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint4& k = unit.k[i][c];
        mma(score[i], q[4 * c], 0, q[4 * c + 1], 0, k.x, k.y);
        mma(score[i], q[4 * c + 2], 0, q[4 * c + 3], 0, k.z, k.w);
      }
    }
    float most = s.most;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int place = number * kUnit + i * 8 + 2 * t + c;
        const bool is_seen = place >= first && place < input.length - 1;
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
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s.o[j][0] *= shrink_even, s.o[j][1] *= shrink_odd, s.o[j][2] *= shrink_even, s.o[j][3] *= shrink_odd;
      const uint32_t v0 = word(unit.v[0], j), v1 = word(unit.v[1], j), v2 = word(unit.v[2], j), v3 = word(unit.v[3], j);
      mma(s.o[j], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
          __byte_perm(v2, v3, 0x7632), b0, b1);
    }
  }

  // Scratch of the warps' parts: o [warps][kGroup][kHeadDim], then most and total [warps][kGroup].
  __device__ float* scratch() const { return reinterpret_cast<float*>(block.activations()); }
  __device__ float* scratch_most() const { return scratch() + P::kWarps * kGroup * kHeadDim; }
  __device__ float* scratch_total() const { return scratch_most() + P::kWarps * kGroup; }
  __device__ void keep(const State& s) const {
    const int g = lane >> 2, t = lane & 3;
    float total = s.total + shuffle_xor(s.total, 1);
    total += shuffle_xor(total, 2);
    if (t == 0) scratch_most()[warp * kGroup + g] = s.most, scratch_total()[warp * kGroup + g] = total;
    float* o = scratch() + warp * kGroup * kHeadDim;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(o + (2 * t + i) * kHeadDim + 8 * g + 2 * j) = make_float2(s.o[j][i], s.o[j][i + 2]);
      }
    }
  }

  // A head's number of a thread's: all of a block's threads have one each, or several.
  static constexpr int kEach = kGroup * kHeadDim / P::kMultiplying;
  static_assert(kGroup * kHeadDim % P::kMultiplying == 0);

  struct Sum {
    float o = 0, most = -INFINITY, total = 0;

    // Another part: what it has for the same head.
    __device__ void add(float its_o, float its_most, float its_total) {
      const float now = fmaxf(most, its_most);
      if (now == -INFINITY) return;
      const float mine = exp2_fast(most - now), its = exp2_fast(its_most - now);
      o = o * mine + its_o * its, total = total * mine + its_total * its, most = now;
    }
  };

  __device__ Sum add_warps(int head, int d) const {
    Sum sum;
#pragma unroll
    for (int w = 0; w < P::kWarps; ++w) sum.most = fmaxf(sum.most, scratch_most()[w * kGroup + head]);
    if (sum.most == -INFINITY) return sum;
#pragma unroll 4
    for (int w = 0; w < P::kWarps; ++w) {
      const float share = exp2_fast(scratch_most()[w * kGroup + head] - sum.most);
      sum.o += share * scratch()[(w * kGroup + head) * kHeadDim + d];
      sum.total += share * scratch_total()[w * kGroup + head];
    }
    return sum;
  }

  // The new token and the sink, and the result.
  __device__ void complete(Sum sum, int head, int d, float sink, float v, float scale) const {
    const float fresh = block.small.new_score[head] * scale, most = fmaxf(fmaxf(sink, fresh), sum.most);
    const float share = exp2_fast(sum.most - most), p = exp2_fast(fresh - most);
    const float o = sum.o * share + rounded(p) * v, total = sum.total * share + p + exp2_fast(sink - most);
    block.attended()[(input.kv_head * kGroup + head) * kHeadDim + d] =
        __float2bfloat16(input.length > 0 ? o / total : 0.0f);
  }

  // The parts of all blocks, once this is the last of them.
  __device__ Sum add_blocks(int head, int d) const {
    float o[P::kSplit], most[P::kSplit], total[P::kSplit];
#pragma unroll
    for (int i = 0; i < P::kSplit; ++i) {
      const float* from = block.head_part(input.kv_head, i) + head * P::kHeadPart;
      o[i] = __ldcg(from + d), most[i] = __ldcg(from + kHeadDim), total[i] = __ldcg(from + kHeadDim + 1);
    }
    Sum sum;
#pragma unroll
    for (int i = 0; i < P::kSplit; ++i) sum.add(o[i], most[i], total[i]);
    return sum;
  }

  // Puts this block's part where the last will find it; tells whether this is the last.
  __device__ bool hand_over() const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = j * P::kMultiplying + threadIdx.x, head = i / kHeadDim, d = i % kHeadDim;
      const Sum sum = add_warps(head, d);
      float* to = block.head_part(input.kv_head, part) + head * P::kHeadPart;
      to[d] = sum.o;
      if (d == 0) to[kHeadDim] = sum.most, to[kHeadDim + 1] = sum.total;
    }
    Block<P>::sync_multiplying();
    if (threadIdx.x == 0) {
      int* attended = &block.counters().attended[input.kv_head].value;
      const bool is_last = add_one_ordered(attended) == P::kSplit - 1;
      // The next to count are of another layer, behind barriers of the grid.
      if (is_last) *attended = 0;
      block.small.is_last = is_last;
    }
    Block<P>::sync_multiplying();
    return block.small.is_last != 0;
  }

  // All warps that multiply. `wait_for_qkv` returns when the projection of all blocks is in memory.
  template <class Wait>
  __device__ void run(Wait wait_for_qkv) const {
    // Pages of earlier steps: they need not wait for the projection.
    Unit unit;
    int number = begin + warp;
    if (number < end) load(unit, number);
    for (int n = number + P::kWarps; n < min(end, number + kAhead * P::kWarps); n += P::kWarps) prefetch_unit(n);
    float sink[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int head = (j * P::kMultiplying + threadIdx.x) / kHeadDim;
      sink[j] = __ldg(layer.sinks + input.kv_head * kGroup + head) * kLog2E;
    }
    wait_for_qkv();
    const Projected projected = load_projected();
    uint32_t q[8];
    turn_query(projected, q);
    take_new_token(projected);
    const float scale = rsqrtf(static_cast<float>(kHeadDim)) * kLog2E;
    State state;
    for (; number < end; number += P::kWarps) {
      if (number + kAhead * P::kWarps < end) prefetch_unit(number + kAhead * P::kWarps);
      attend(state, q, unit, number, scale);
      if (number + P::kWarps < end) load(unit, number + P::kWarps);
    }
    keep(state);
    Block<P>::sync_multiplying();
    const bool is_whole = num_parts == 1;
    if (!is_whole && !hand_over()) return;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = j * P::kMultiplying + threadIdx.x, head = i / kHeadDim, d = i % kHeadDim;
      const Sum sum = is_whole ? add_warps(head, d) : add_blocks(head, d);
      complete(sum, head, d, sink[j], projected.completed_v, scale);
    }
  }
};

}  // namespace rose::layers
