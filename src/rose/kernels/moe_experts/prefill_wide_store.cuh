// Ends of tiles of prefill_wide.cuh: all ways out lead through a staged tile in shared memory.
#pragma once

#include "prefill_swapped_ptx.cuh"
#include "prefill_wide_plan.cuh"
#include "warp.cuh"

namespace rose::moe::wide {

// SwiGLU of two tokens next to each other: `total` is four sums of a fragment, gate and up.
__device__ __forceinline__ void swiglu_pair(float (&hidden)[2], const float* total, const uint32_t (&scales)[2],
                                            float gate_bias, float up_bias, float alpha2, float limit, float inverse) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float scale = __uint_as_float(scales[c]);
    const float gate = fminf(total[c] * scale + gate_bias, limit);
    const float up = fminf(fmaxf(total[2 + c] * scale + up_bias, -limit), limit);
    // As fast_swiglu, in units of hidden_unit.
    hidden[c] = gate * fast_reciprocal(1.f + fast_exp2(alpha2 * gate)) * (up * inverse + inverse);
  }
}

// SwiGLU of a consumer's 32 channels as E4M3, through shared memory to where they belong. Staged: for the pair q of
// tokens 16 (q / 8) + q % 8 and eight further, the chunks of four warps, each eight channels of both tokens in turns.
template <typename P, int kN>
__device__ __forceinline__ void store_hidden(const float (&total)[kN / 2], const Problem& p, const Place& place,
                                             uint32_t end, uint32_t staged, int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const float alpha2 = -1.4426950408889634f * p.alpha, inverse = 1.f / p.hidden_unit;
  const uint32_t bias = end + P::kBiasAt + 8 * code_row<P>(thread);
  const float gate_bias = load_shared(bias), up_bias = load_shared(bias + 4);
  named_sync(1 + consumer, 128);  // what was staged of the tile before is stored
#pragma unroll
  for (int m = 0; m < kN / 16; m += 4) {  // matrix i of four: 16 tokens
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4 && m + i < kN / 16; ++i) {
      float hidden[2][2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int j = 2 * (m + i) + b;
        uint32_t scales[2];
        load_shared(scales, end + 4 * (8 * j + 2 * (thread % 4)));
        swiglu_pair(hidden[b], total + 4 * j, scales, gate_bias, up_bias, alpha2, p.limit, inverse);
      }
      words[i] = pack_e4m3(hidden[0][0], hidden[1][0], hidden[0][1], hidden[1][1]);
    }
    const int pair = 8 * m + lane;
    store_transposed(staged + 64 * pair + 16 * (warp ^ (pair / 2 % 4)), words);
  }
  named_sync(1 + consumer, 128);
  const int first = place.column / 2, group = first & ~127, part = first % 128 / 64;
  const bool is_half = p.n / 2 - group < 128;
#pragma unroll 1
  for (int task = thread % 128; task < kN; task += 128) {
    const int pair = task / 2, v = task % 2;
    uint32_t low[4], high[4];
    load_shared(low, staged + 64 * pair + 16 * (v ^ (pair / 2 % 4)));
    load_shared(high, staged + 64 * pair + 16 * ((v + 2) ^ (pair / 2 % 4)));
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int token = 16 * (pair / 8) + pair % 8 + 8 * b;
      if (token >= place.rows) break;
      uint8_t* row = p.hidden + (size_t(place.row) + token) * (p.n / 2) + group;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const uint32_t order = b ? 0x7531 : 0x6420;
        const uint32_t one = __byte_perm(low[2 * u], low[2 * u + 1], order);
        const uint32_t other = __byte_perm(high[2 * u], high[2 * u + 1], order);
        if (is_half) {
          *reinterpret_cast<uint32_t*>(row + 32 * v + 16 * u + 4 * consumer) = one;
          *reinterpret_cast<uint32_t*>(row + 32 * v + 16 * u + 4 * consumer + 8) = other;
        } else {
          *reinterpret_cast<uint2*>(row + 32 * (2 * consumer + v) + 16 * u + 8 * part) = make_uint2(one, other);
        }
      }
    }
  }
}

// Output rows of a consumer through its staged 128 tokens x 64 rows, so that whole lines are written.
template <typename P, int kN>
__device__ __forceinline__ void store_rows(const float (&total)[kN / 2], const Problem& p, const Place& place,
                                           uint32_t end, uint32_t staged, int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const int column = place.column + 64 * consumer;
#pragma unroll
  for (int first = 0; first < kN; first += 128) {
    named_sync(1 + consumer, 128);  // what was staged before is stored
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float bias = load_shared(end + P::kBiasAt + 4 * (code_row<P>(thread) + 8 * h));
      const int chunk = (2 * warp + h) ^ (lane % 8);
#pragma unroll
      for (int m = first / 8; m < kN / 8 && m < first / 8 + 16; m += 4) {  // matrix i of four: eight tokens
        uint32_t words[4] = {};
#pragma unroll
        for (int i = 0; i < 4 && m + i < kN / 8; ++i) {
          const float* d = total + 4 * (m + i) + 2 * h;
          uint32_t scales[2];
          load_shared(scales, end + 4 * (8 * (m + i) + 2 * (thread % 4)));
          words[i] = pack_bf16(d[0] * __uint_as_float(scales[0]) + bias, d[1] * __uint_as_float(scales[1]) + bias);
        }
        store_transposed(staged + (8 * m - first + lane) * 128 + 16 * chunk, words);
      }
    }
    named_sync(1 + consumer, 128);
    const int part = lane % 8;
    for (int token = 4 * warp + lane / 8; token < min(128, place.rows - first); token += 16) {
      uint32_t words[4];
      load_shared(words, staged + token * 128 + 16 * (part ^ (token % 8)));
      *reinterpret_cast<uint4*>(p.y + (size_t(place.row) + first + token) * p.n + column + 8 * part) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace rose::moe::wide
