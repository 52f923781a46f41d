// Ends of tiles of prefill_fused.cuh: SwiGLU and its quantisation, or rows of the output.
#pragma once

#include "prefill_fused_plan.cuh"
#include "warp.cuh"

namespace rose::moe::fused {

// SwiGLU of a piece, in place: channels of half h are total[4j + 2h].
__device__ __forceinline__ void activate(float (&total)[64], const Problem& p) {
  const float alpha2 = -1.4426950408889634f * p.alpha;
#pragma unroll
  for (int i = 0; i < 64; i += 2) total[i] = fast_swiglu(total[i], total[i + 1], alpha2, p.limit);
}

// Row of a tile that a thread's first sums belong to.
__device__ __forceinline__ int row_of(int thread) {
  return thread / 128 * kSlab + thread % 128 / 32 * 16 + thread % 32 / 4;
}

// One row of a group of up to 128 channels: `first` and `second` are 64 each; `row` of all rows.
__device__ __forceinline__ void store_group(const float (&first)[16], const float (&second)[16], bool has_second,
                                            bool is_in, const Problem& p, size_t row, int channel, int q) {
  float amax = 0.f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    amax = fmaxf(amax, fabsf(first[j]));
    if (has_second) amax = fmaxf(amax, fabsf(second[j]));
  }
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
  const float scale = fmaxf(amax, 1e-4f) * (1.f / 448.f);
  const float inverse = fast_reciprocal(scale);
  if (is_in && q == 0) p.hidden_scales[size_t(channel / 128) * p.scales_stride + row] = scale;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (s == 1 && !has_second) break;
    uint32_t words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float* d = (s ? second : first) + 4 * t;
      words[t] = pack_e4m3(d[0] * inverse, d[1] * inverse, d[2] * inverse, d[3] * inverse);
    }
    transpose_quad(words, q);
    if (is_in) {
      *reinterpret_cast<uint4*>(p.hidden + row * (p.n / 2) + channel + 64 * s + 16 * q) = transpose_bytes(words);
    }
  }
}

template <typename P>
__device__ __forceinline__ void store_hidden(float (&total)[2][64], const Problem& p, const Place& place, int thread,
                                             int pieces, uint32_t parked, bool is_second) {
  const int row = row_of(thread), q = thread % 4;
  if constexpr (P::kRuns == 2) {
#pragma unroll
    for (int s = 0; s < 2; ++s) activate(total[s], p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float first[16], second[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        first[j] = total[0][4 * j + 2 * half];
        second[j] = total[1][4 * j + 2 * half];
      }
      store_group(first, second, pieces == 2, row + 8 * half < place.rows, p, size_t(place.row) + row + 8 * half,
                  place.column / 2, q);
    }
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (s >= pieces) break;
      activate(total[s], p);
      const uint32_t words = parked + 4 * (s * 16 * 256 + thread);
      if (!is_second && place.column + kColumns < p.n) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          store_shared(words + 4 * 256 * j, pack_half(total[s][4 * j], total[s][4 * j + 2]));
        }
        continue;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float kept[16], fresh[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          fresh[j] = total[s][4 * j + 2 * half];
          kept[j] = is_second ? half_of(__float_as_uint(load_shared(words + 4 * 256 * j)), half) : fresh[j];
        }
        const int local = row + 2 * kSlab * s + 8 * half;
        store_group(kept, fresh, is_second, local < place.rows, p, size_t(place.row) + local,
                    (place.column - (is_second ? kColumns : 0)) / 2, q);
      }
    }
  }
}

template <typename P>
__device__ __forceinline__ void store_rows(const float (&total)[2][64], const Problem& p, const Place& place,
                                           int thread, int pieces) {
  const int row = row_of(thread), q = thread % 4;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (s >= pieces) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = row + (P::kSlabs == 2 ? 2 * kSlab * s : 0) + 8 * half;
      const bool is_in = local < place.rows;
      __nv_bfloat16* out = p.y + (size_t(place.row) + local) * p.n;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* d = &total[s][4 * (4 * t + i) + 2 * half];
          words[i] = pack_bf16(d[0], d[1]);
        }
        transpose_quad(words, q);
        const int column = place.column + (P::kRuns == 2 ? kColumns * s : 0) + 32 * t + 8 * q;
        if (is_in && column < p.n) {
          *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

}  // namespace rose::moe::fused
