// A call of the decode experts, whichever kernel takes it: its arguments, codes to bf16, the experts that were chosen.
#pragma once

#include "decode_ptx.cuh"
#include "launch.cuh"

namespace rose::moe_decode {

constexpr float kCodeScale = 0x1p64f;  // unpacked weights are times 2^-64: room for block scales 2^-69 .. 2^65

struct Call {
  const int* ids;            // [tokens * chosen]
  const uint8_t* codes;      // [experts, rows, columns / 2] mxfp4; [experts, rows, columns] fp8
  const void* scales;        // mxfp4: e8m0 [experts, rows, columns / 32]; fp8: float [experts, rows / 128, columns / 128]
  const int* exponents;      // E4M3 alone: [experts, rows / 64], biased by 127 (e4m3_weights.py)
  const __nv_bfloat16* bias;  // [experts, rows]
  const __nv_bfloat16* x;     // gate_up: [tokens, columns]; down: [pairs, columns]
  __nv_bfloat16* act;         // gate_up: [pairs, rows / 2]
  float* y;                   // down: [pairs, rows], which a later kernel adds up
  int pairs, chosen, experts, rows, columns;
  float alpha, limit;
  bool is_fp8;
  int stages, x_rows;
};

// Eight e2m1 codes into pairs (0, 4), (1, 5), (2, 6), (3, 7) of bf16, times `scale`. The magnitude's bits land on the
// low exponent bits and the first mantissa bit, which is exact also for 0.5 (a subnormal bf16). The integer unit is the
// one that is full: a product with 2^6 + 2^12, which another unit forms, puts sign and magnitude in place at once.
__device__ __forceinline__ void unpack_e2m1(uint32_t w, uint32_t scale, uint32_t (&v)[4]) {
  constexpr uint32_t kKeep = 0x81C081C0u;
  const uint32_t u = w >> 8;
  v[0] = multiply(((w & 0x000F000Fu) * 0x1040u) & kKeep, scale);
  v[1] = multiply(((w & 0x00F000F0u) * 0x0104u) & kKeep, scale);
  v[2] = multiply(((u & 0x000F000Fu) * 0x1040u) & kKeep, scale);
  v[3] = multiply(((u & 0x00F000F0u) * 0x0104u) & kKeep, scale);
}

// Four e4m3 codes into pairs (0, 2), (1, 3), likewise.
__device__ __forceinline__ void unpack_e4m3(uint32_t w, uint32_t scale, uint32_t& v0, uint32_t& v1) {
  constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x07F007F0u;
  v0 = multiply(((w << 8) & kSign) | ((w << 4) & kMagnitude), scale);
  v1 = multiply((w & kSign) | ((w >> 4) & kMagnitude), scale);
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// List the experts that were chosen, a hit for each of up to kTokens of their pairs: {expert, first in order, number}.
// The pairs of an expert keep their order.
template <int kTokens, int kThreads>
__device__ void list_hits(const Call& c, int4* hits, int* counts, uint16_t* order, int* num_hits) {
  const int tid = threadIdx.x, lane = tid & 31;
  uint16_t* position = order + c.pairs;
  if (c.pairs <= 32) {
    if (tid < 32) {
      int e = lane < c.pairs ? c.ids[lane] : -1;
      const bool is_here = e >= 0;
      const unsigned same = __match_any_sync(~0u, e);
      const int rank = __popc(same & ((1u << lane) - 1)), n = __popc(same);
      const bool leads = is_here && rank == 0;
      int sum_n = leads ? n : 0, sum_v = leads ? (n + kTokens - 1) / kTokens : 0;
      const int own_n = sum_n, own_v = sum_v;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int a = __shfl_up_sync(~0u, sum_n, d), b = __shfl_up_sync(~0u, sum_v, d);
        if (lane >= d) sum_n += a, sum_v += b;
      }
      const int start = sum_n - own_n;
      for (int i = 0; i < own_v; ++i) {
        hits[sum_v - own_v + i] = make_int4(e, start + i * kTokens, min(kTokens, n - i * kTokens), 0);
      }
      const int first = __shfl_sync(~0u, start, __ffs(same) - 1);
      if (is_here) order[first + rank] = lane;
      if (lane == 31) *num_hits = sum_v;
    }
    __syncthreads();
    return;
  }
  for (int e = tid; e < c.experts; e += kThreads) counts[e] = 0;
  for (int p = tid; p < c.pairs; p += kThreads) position[p] = c.ids[p];  // -1 becomes 0xFFFF
  __syncthreads();
  if (tid < 32) {
    // Ranks in the order of pairs: all blocks must agree on which pairs share a hit.
    for (int base = 0; base < c.pairs; base += 32) {
      const int p = base + lane, e = p < c.pairs ? position[p] : 0xFFFF;
      const unsigned same = __match_any_sync(~0u, e), below = same & ((1u << lane) - 1);
      const bool is_here = e != 0xFFFF;
      const int before = is_here ? counts[e] : 0;
      __syncwarp();
      if (is_here) position[p] = before + __popc(below);
      if (is_here && below == 0) counts[e] = before + __popc(same);
      __syncwarp();
    }
    int before_n = 0, before_v = 0;
    for (int base = 0; base < c.experts; base += 32) {
      const int e = base + lane, n = e < c.experts ? counts[e] : 0, v = (n + kTokens - 1) / kTokens;
      int sum_n = n, sum_v = v;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int a = __shfl_up_sync(~0u, sum_n, d), b = __shfl_up_sync(~0u, sum_v, d);
        if (lane >= d) sum_n += a, sum_v += b;
      }
      const int start = before_n + sum_n - n;
      for (int i = 0; i < v; ++i) {
        hits[before_v + sum_v - v + i] = make_int4(e, start + i * kTokens, min(kTokens, n - i * kTokens), 0);
      }
      if (e < c.experts) counts[e] = start;
      before_n += __shfl_sync(~0u, sum_n, 31);
      before_v += __shfl_sync(~0u, sum_v, 31);
    }
    if (lane == 0) *num_hits = before_v;
  }
  __syncthreads();
  for (int p = tid; p < c.pairs; p += kThreads) {
    const int e = c.ids[p];
    if (e >= 0) order[counts[e] + position[p]] = p;
  }
  __syncthreads();
}

}  // namespace rose::moe_decode
