// Quantisation of tokens for prefill_wide.cuh.
#pragma once

#include "prefill_tiles.cuh"

namespace rose::moe::wide {

// One warp per token, sixteen columns a lane and round, one scale for all columns: quantised once, written to each row in
// the order of prefill_swapped.cuh (quantize_wide of prefill_rows.cuh has
// the same with a scale for 128 columns).
template <int kChosenMax, int kRounds>
__global__ void quantize_tokens(const __nv_bfloat16* x, const int* row_of_pair, uint8_t* values, float* scales,
                                int tokens, int columns, int chosen) {
  const int64_t token = tokens - 1 - (int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32);
  if (token < 0) return;
  const int lane = threadIdx.x % 32, part = lane % 8;
  uint4 raw[kRounds][2] = {};
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int column = 512 * i + 16 * lane;
    if (column < columns) {
      const uint4* from = reinterpret_cast<const uint4*>(x + token * columns + column);
      raw[i][0] = __ldcs(from);
      raw[i][1] = __ldcs(from + 1);
    }
  }
  int rows[kChosenMax];
#pragma unroll
  for (int k = 0; k < kChosenMax; ++k) rows[k] = k < chosen ? __ldg(row_of_pair + token * chosen + k) : -1;
  const auto value = [&](int i, int c) {
    const uint4& four = raw[i][c / 8];
    const uint32_t words[4] = {four.x, four.y, four.z, four.w}, word = words[c % 8 / 2];
    return __uint_as_float(c % 2 ? word & 0xffff0000u : word << 16);
  };
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
#pragma unroll
    for (int c = 0; c < 16; ++c) amax = fmaxf(amax, fabsf(value(i, c)));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  const float scale = fmaxf(amax, 1e-4f) / 448.f, inverse = 1.f / scale;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    uint32_t packed[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      packed[w] = pack_e4m3(value(i, 4 * w) * inverse, value(i, 4 * w + 1) * inverse, value(i, 4 * w + 2) * inverse,
                            value(i, 4 * w + 3) * inverse);
    }
    const int group = 512 * i + lane / 8 * 128;
    const bool is_half = group + 64 == columns;
    const int turn = is_half ? part % 4 : part / 2;
    transpose_lanes(packed, turn, is_half ? 1 : 2);
    const int place = group + 16 * (is_half ? part : 4 * (part % 2) + turn);
#pragma unroll
    for (int k = 0; k < kChosenMax; ++k) {
      if (rows[k] >= 0 && 512 * i + 16 * lane < columns) {
        *reinterpret_cast<uint4*>(values + int64_t(rows[k]) * columns + place) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kChosenMax; ++k) {
    if (lane == k && rows[k] >= 0) scales[rows[k]] = scale;
  }
}

}  // namespace rose::moe::wide
