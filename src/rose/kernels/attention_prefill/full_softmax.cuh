// The running softmax of full.cuh, whose part this is: scores of a tile, in registers.
#pragma once

#include "full_fill.cuh"

// A thread's sum of a tile's probabilities, from which on its maximum is raised. Sums of 2^20 keys stay finite, and
// a probability that is lost beside it (2^-126) is lost in float32 too.
constexpr float kTrustedSum = 18446744073709551616.0f;  // 2^64

// What the rows of a thread (g and g + 8 of its warp) have come to.
struct Running {
  float maximum[2], sum[2];
  float factor[2];  // by which the output so far has to be multiplied, where the maxima were raised
};

// The largest raw score of each row in this thread's columns and before.
__device__ __forceinline__ void find_tops(const float (&s)[kScores], const float (&maximum)[2], float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float a = fmaxf(maximum[h], s[2 * h]), b = s[2 * h + 1];
#pragma unroll
    for (int j = 1; j < kTile / 8; ++j) {
      a = fmaxf(a, s[4 * j + 2 * h]);
      b = fmaxf(b, s[4 * j + 2 * h + 1]);
    }
    top[h] = fmaxf(a, b);
  }
}

__device__ __forceinline__ void share_tops(float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
  }
}

// Scores become probabilities relative to `maximum`; `sum` is that of this thread's columns.
__device__ __forceinline__ void exponentiate(float (&s)[kScores], const float (&maximum)[2], const Parameters& p,
                                             float (&sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float offset = -maximum[h] * p.scale_log2;
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      float& low = s[4 * j + 2 * h];
      float& high = s[4 * j + 2 * h + 1];
      low = fmaf(low, p.scale_log2, offset);
      high = fmaf(high, p.scale_log2, offset);
      low = exp2_mufu(low);
      high = exp2_mufu(high);
      a += low;
      b += high;
    }
    sum[h] = a + b;
  }
}

// Mask what a row must not see. `last` is the row's position minus the column of this thread's first score.
__device__ __forceinline__ void mask_scores(float (&s)[kScores], const int (&last)[2], int window) {
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * j + (e & 1), limit = last[e >> 1];
      if (column > limit || column <= limit - window) s[4 * j + e] = -INFINITY;
    }
  }
}

// Before the first score: the sink.
__device__ __forceinline__ void start_softmax(Running& r, const Parameters& p, int head) {
  const float sink = p.sinks[head] * p.inverse_scale;
  r.maximum[0] = r.maximum[1] = fmaxf(sink, kLowest);
  // Each thread of a quad sums its own columns; one of them also holds the sink.
  r.sum[0] = r.sum[1] = (threadIdx.x & 3) == 0 ? exp2_mufu((sink - r.maximum[0]) * p.scale_log2) : 0.0f;
}

// Raise the maxima to what scores demand; sums follow, r.factor is for the output.
__device__ __forceinline__ void raise_maxima(const float (&s)[kScores], Running& r, const Parameters& p) {
  float top[2];
  find_tops(s, r.maximum, top);
  share_tops(top);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    r.factor[h] = exp2_mufu((r.maximum[h] - top[h]) * p.scale_log2);
    r.maximum[h] = top[h];
    r.sum[h] *= r.factor[h];
  }
}

// Scores become probabilities; redo() makes the scores again where the maxima have to be raised. Products on `o` may be
// in flight; others' results are not touched.
template <class Redo>
__device__ __forceinline__ void take_trusting(float (&s)[kScores], float (&o)[32], Running& r, const Parameters& p,
                                              Redo redo) {
  float sum[2];
  exponentiate(s, r.maximum, p, sum);
  // Also where a sum is infinite. Besides, no wait after this branch is moved above the exponentials.
  if (__builtin_expect(__any_sync(~0u, !(sum[0] + sum[1] < kTrustedSum)), 0)) {
    redo();
    raise_maxima(s, r, p);
    exponentiate(s, r.maximum, p, sum);
    wgmma_wait<0>();
    settle(o);
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] *= r.factor[(i >> 1) & 1];
  }
  r.sum[0] += sum[0];
  r.sum[1] += sum[1];
}

__device__ __forceinline__ void pack_scores(const float (&s)[kScores], uint32_t (&packed)[kTile / 16][4]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) packed[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void settle_packed(uint32_t (&packed)[kTile / 16][4]) {
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) settle(packed[k]);
}
