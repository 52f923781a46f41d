// Ends of tiles of prefill_swapped.cuh: both ways out lead through a staged tile in shared memory.
#pragma once

#include "prefill_swapped_plan.cuh"
#include "prefill_swapped_ptx.cuh"

namespace rose::moe::swapped {

// SwiGLU of 64 channels, as fp16 in the staged tile [token][channel]; chunks of 16 bytes are swapped by token.
template <typename P, int kN>
__device__ __forceinline__ void stage_hidden(const float (&total)[2][2][kN / 2], const Problem& p, float row_scale,
                                             uint32_t staged, int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const float alpha2 = -1.4426950408889634f * p.alpha;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int chunk = (8 * consumer + 4 * s + warp) ^ (lane % 8);
#pragma unroll
    for (int m = 0; m < kN / 4; m += 4) {  // matrix m: tokens 8m .. 8m + 7
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int piece = (m + i) / (kN / 8), j = (m + i) % (kN / 8);
        const float* d = &total[s][piece][4 * j];
        words[i] = pack_half(fast_swiglu(d[0] * row_scale, d[2] * row_scale, alpha2, p.limit),
                             fast_swiglu(d[1] * row_scale, d[3] * row_scale, alpha2, p.limit));
      }
      store_transposed(staged + (8 * m + lane) * kItemRows + 16 * chunk, words);
    }
  }
}

// A staged tile to E4M3 with a scale per token, in the order in which down reads it. One warpgroup, eight lanes a token.
template <typename P>
__device__ __forceinline__ void quantize_staged(const Problem& p, const Place& place, uint32_t staged, int thread) {
  const int warp = thread % 128 / 32, lane = thread % 32, part = lane % 8;
  const int channel = place.column / 2, block = p.n - place.column < kItemRows ? 16 : 32;  // channels of a lane's word t
  const bool is_part = part < block / 4;
  // Four tokens a round, eight in two; tokens 4 apart lie in other banks.
  for (int round = 0; 32 * (round / 2) + 8 * warp < place.rows; ++round) {
    const int token = 32 * (round / 2) + 8 * warp + 2 * (round % 2) + lane / 16 + 4 * (lane / 8 % 2);
    float v[16], amax = 0.f;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int first = block * t + 4 * part;
      uint32_t pair[2] = {0, 0};
      if (is_part) {
        load_shared(pair, staged + token * kItemRows + 16 * ((first / 8) ^ (token % 8)) + 2 * (first % 8));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[4 * t + i] = half_of(pair[i / 2], i % 2);
        amax = fmaxf(amax, fabsf(v[4 * t + i]));
      }
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    const float scale = fmaxf(amax, 1e-4f) * (1.f / 448.f), inverse = fast_reciprocal(scale);
    uint32_t words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float* d = v + 4 * t;
      words[t] = pack_e4m3(d[0] * inverse, d[1] * inverse, d[2] * inverse, d[3] * inverse);
    }
    if (token < place.rows) {
      const size_t row = size_t(place.row) + token;
      if (part == 0) p.hidden_scales[size_t(channel / 128) * p.scales_stride + row] = scale;
      if (is_part) {
        *reinterpret_cast<uint4*>(p.hidden + row * (p.n / 2) + channel + 16 * part) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// Output rows of one consumer: each slab through its half of the staged tile, so that whole lines are written.
template <typename P, int kN>
__device__ __forceinline__ void store_rows(const float (&total)[2][2][kN / 2], const Problem& p, const Place& place,
                                           float row_scale, uint32_t staged, int thread) {
  const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const uint32_t mine = staged + consumer * kTokens * 128;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int column = place.column + 128 * consumer + 64 * s;
    if (column >= p.n) break;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int chunk = (2 * warp + h) ^ (lane % 8);
#pragma unroll
      for (int m = 0; m < kN / 4; m += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* d = &total[s][(m + i) / (kN / 8)][4 * ((m + i) % (kN / 8)) + 2 * h];
          words[i] = pack_bf16(d[0] * row_scale, d[1] * row_scale);
        }
        store_transposed(mine + (8 * m + lane) * 128 + 16 * chunk, words);
      }
    }
    named_sync(1 + consumer, 128);
    const int part = lane % 8;
    for (int token = 4 * warp + lane / 8; token < place.rows; token += 16) {
      uint32_t words[4];
      load_shared(words, mine + token * 128 + 16 * (part ^ (token % 8)));
      *reinterpret_cast<uint4*>(p.y + (size_t(place.row) + token) * p.n + column + 8 * part) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
    named_sync(1 + consumer, 128);
  }
}

}  // namespace rose::moe::swapped
