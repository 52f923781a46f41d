// Experts of small batches on Hopper, 64 rows at a time: codes pass from memory through rings in shared memory
// (decode_chunks.cuh) into registers and, as E4M3, into wgmma. An e2m1 code becomes an e4m3 byte in 7 instructions for
// 8 codes, where bf16 times its scale takes 17.
//
// A warpgroup unpacks a tile once, whatever the number of tokens up to kN: its rows are operand A, in registers.
//
// Exact up to the tensor core's own sums: a code is 2^6 times its byte; an activation (8 bits of significand) times a
// power of two of its token is the sum of two E4M3 numbers (4 bits each), of which the second is cut at 2^-17 of the
// token's largest. Both are operand B in shared memory. A product covers one block of 32 columns, so that the block's
// scale multiplies its sums in float32 registers.
//
// Word t of a block holds columns 8t to 8t + 7 of a row. Even ones are columns 4t to 4t + 3 of the product, odd ones
// 16 + 4t to 19 + 4t; activations are stored in that order.
#pragma once

#include "decode_chunks.cuh"
#include "decode_e4m3_ptx.cuh"

namespace rose::moe_decode {

constexpr int kMostWarps = 16;

// Of its own: the factor of each token, and what the warps find to be the largest of their rows, in two turns.
template <int kN, int kGroups, int kStages>
__host__ __device__ RingLayout e4m3_layout(const Call& c) {
  return RingLayout::make<kN, kGroups, kStages>(c, kN * 4 + 2 * kMostWarps * 4);
}

// Eight e2m1 codes to E4M3 times 2^-6, even ones and odd ones: the magnitude's three bits land on the two lowest bits
// of the exponent and the first of the mantissa, which is exact also for 0.5 (a subnormal).
__device__ __forceinline__ void codes_to_e4m3(uint32_t w, uint32_t& even, uint32_t& odd) {
  constexpr uint32_t kSign = 0x80808080u, kKeep = 0x9C9C9C9Cu;
  const uint32_t up = w << 4, middle = w << 2, down = w >> 2;
  even = ((up & kSign) | (middle & ~kSign)) & kKeep;
  odd = ((w & kSign) | (down & ~kSign)) & kKeep;
}

// Copy the activations of a hit to shared memory, split in two: for 128 columns a tile of kN rows for the first
// parts, then one for the second; K-major with 128-byte swizzle. Up to four warps share a row. Syncs the block before
// it writes, unless the block is new.
template <int kN, bool kGateUp, int kWarps>
__device__ __forceinline__ void split_operand(const Call& c, const int4& hit, const uint16_t* order, uint8_t* x_shared,
                                              float* factors, uint32_t (*largest)[kMostWarps]) {
  constexpr int kMost = 12;  // pieces of 8 columns per lane: rows of up to 3072
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pieces = c.columns / 8;
  const int share = hit.z * 4 <= kWarps ? 4 : hit.z * 2 <= kWarps ? 2 : 1, rows = kWarps / share;
  for (int first = 0, round = 0; first < hit.z; first += rows, ++round) {
    const int row = first + warp / share, part = warp % share;
    const bool is_in = row < hit.z && warp / share < rows;
    uint4 v[kMost];
    uint32_t most = 0;
    if (is_in) {
      const int pair = order[hit.y + row];
      const __nv_bfloat16* source = c.x + static_cast<size_t>(kGateUp ? pair / c.chosen : pair) * c.columns;
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        const int piece = (i * share + part) * 32 + lane;
        v[i] = uint4{0, 0, 0, 0};
        if (piece < pieces) v[i] = __ldcg(reinterpret_cast<const uint4*>(source + piece * 8));
      }
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        most = larger_magnitudes(most, larger_magnitudes(larger_magnitudes(v[i].x, v[i].y), larger_magnitudes(v[i].z, v[i].w)));
      }
      most = max(most & 0x7FFF, most >> 16 & 0x7FFF);
      most = warp_max(most);
      if (lane == 0) largest[round & 1][warp] = most;
    }
    __syncthreads();
    if (!is_in) continue;
    for (int i = 0; i < share; ++i) most = max(most, largest[round & 1][warp - part + i]);
    // The largest comes to lie between 2^7 and 2^8; powers of two stay within those of float32.
    const int exponent = max(7 + 127 - static_cast<int>(most >> 7), -119);
    const int shift = min(exponent, 120);
    const float scale = __uint_as_float((127 + shift) << 23);
    if (part == 0 && lane == 0) {
      // Codes bring 2^-6. Infinity and NaN pass on.
      factors[row] = most >= 0x7F80 ? __uint_as_float(0x7FC00000u) : __uint_as_float((127 + 6 - shift) << 23);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int piece = (i * share + part) * 32 + lane;
      if (piece >= pieces) break;
      const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
      uint32_t even[2] = {}, odd[2] = {};  // first parts, second parts
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float a = __uint_as_float(words[j] << 16) * scale, b = __uint_as_float(words[j] & 0xFFFF0000u) * scale;
        const uint32_t one = to_e4m3(a, b);
        const float2 back = from_e4m3(one);
        const uint32_t two = to_e4m3(a - back.x, b - back.y);
        even[0] |= (one & 0xFF) << 8 * j, odd[0] |= (one >> 8) << 8 * j;
        even[1] |= (two & 0xFF) << 8 * j, odd[1] |= (two >> 8) << 8 * j;
      }
      const int block = piece >> 2, t = piece & 3, place = 2 * (block & 3), turn = row & 7;
      uint8_t* target = x_shared + ((block >> 2) * 2 * kN + row) * 128 + 4 * t;
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        *reinterpret_cast<uint32_t*>(target + p * kN * 128 + (place ^ turn) * 16) = even[p];
        *reinterpret_cast<uint32_t*>(target + p * kN * 128 + ((place + 1) ^ turn) * 16) = odd[p];
      }
    }
  }
}

// Write SwiGLU or output rows of a tile. Thread (g, t) of a warp has rows 2g and 2g + 1 of the warp's 16 for tokens
// 8j + 2t and 8j + 2t + 1; from g = 4 on the odd row comes first.
template <int kN, bool kGateUp>
__device__ __forceinline__ void finish_split_tile(const Call& c, const int4& hit, int tile, const float (&d)[kN / 2],
                                                  const uint16_t* order, const float* factors) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = (threadIdx.x >> 5) & 3;
  const int row = tile * kTileRows + warp * 16 + 2 * g;
  const uint32_t bias = *reinterpret_cast<const uint32_t*>(c.bias + static_cast<size_t>(hit.x) * c.rows + row);
  const float bias_even = __uint_as_float(bias << 16), bias_odd = __uint_as_float(bias & 0xFFFF0000u);
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * j + 2 * t + i;
      if (token >= hit.z) continue;
      const size_t pair = order[hit.y + token];
      const float first = d[4 * j + i] * factors[token], second = d[4 * j + 2 + i] * factors[token];
      const float even = (g < 4 ? first : second) + bias_even, odd = (g < 4 ? second : first) + bias_odd;
      if constexpr (kGateUp) {
        const float gate = fminf(even, c.limit), up = fminf(fmaxf(odd, -c.limit), c.limit);
        c.act[pair * (c.rows / 2) + row / 2] = __float2bfloat16(gate / (1.0f + __expf(-c.alpha * gate)) * (up + 1.0f));
      } else {
        *reinterpret_cast<float2*>(c.y + pair * c.rows + row) = make_float2(even, odd);
      }
    }
  }
}

// Grid: any number of blocks.
template <bool kGateUp, int kN, int kGroups, int kStages, int kColumns>
__global__ void __launch_bounds__(kGroups * 128, 1)
    e4m3_kernel(const Call c, const __grid_constant__ CUtensorMap codes_map) {
  constexpr int blocks = kColumns / 32;
  constexpr int kChunks = (blocks + 7) / 8, kLastSteps = (blocks - 8 * (kChunks - 1)) / 2;
  static_assert(kColumns % 64 == 0, "a step is two blocks");
  extern __shared__ __align__(1024) uint8_t shared[];
  const RingLayout l = e4m3_layout<kN, kGroups, kStages>(c);
  int4* hits = reinterpret_cast<int4*>(shared + l.hits);
  uint16_t* order = reinterpret_cast<uint16_t*>(shared + l.order);
  int* counts = reinterpret_cast<int*>(shared + l.counts);
  float* factors = reinterpret_cast<float*>(shared + l.own);
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, g = lane >> 2;
  // Which warp this is, in a way that shows the compiler that all lanes agree: descriptors then stay in uniform
  // registers. For the same reason one lane's instructions are predicated and no branch is taken around them.
  const int whole_warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0);
  const int group = whole_warp >> 2;
  // The issuing warps of the groups are on different schedulers.
  const bool is_issuer = (whole_warp & 3) == (group & 3), is_first_lane = lane == 0;
  const uint32_t full = shared_address(shared + l.barriers) + group * kStages * 8;

  const Run run = begin_rings<kGateUp, kN, kGroups, kStages>(c, full, hits, counts, order);
  Issuer<kGroups, kStages, kColumns> issuer(run, l, shared, group, is_first_lane);
  auto issue = [&] { issuer.issue(c, codes_map, hits, l.scale_bytes); };
  if (is_issuer) {
    for (int s = 0; s < kStages; ++s) issue();
  }

  // Rows g of the warp's product are even rows of the tile for g < 4 and odd ones after, rows g + 8 the others: eight
  // rows of a matrix then differ in their swizzle.
  const int from = lane & 7, matrix = lane >> 3, local = 2 * from + ((from >> 2) ^ (matrix & 1));
  const uint32_t lane_codes = shared_address(shared) + group * kStages * kChunkBytes + (warp * 16 + local) * 128 +
                              ((local & 7) ^ (matrix >> 1)) * 16;
  const int row = warp * 16 + 2 * g;
  const uint8_t* lane_scales = shared + l.scales + group * 2 * l.scale_bytes + row * blocks;
  const int first_offset = g < 4 ? 0 : blocks, second_offset = blocks - first_offset;

  bool has_waited = kGateUp;
  int buffer = 0, stage = 0;
  uint32_t parity = 0;
  for (int item = run.begin; item < run.end;) {
    const int number = item / run.tiles, last = min(run.end, (number + 1) * run.tiles);
    const int4 h = hits[number];
    if (!has_waited) {
      wait_for_kernel_before();
      let_next_kernel_start();
      has_waited = true;
    }
    split_operand<kN, kGateUp, kGroups * 4>(c, h, order, shared + l.x, factors,
                                            reinterpret_cast<uint32_t(*)[kMostWarps]>(factors + kN));
    fence_proxy_async();
    __syncthreads();
    const uint32_t x_at = descriptor_low(shared_address(shared + l.x));
    // Items of a run go round the warpgroups whatever the hit.
    for (int own = item + (group + kGroups - (item - run.begin) % kGroups) % kGroups; own < last; own += kGroups) {
      const uint8_t* scales = lane_scales + buffer * l.scale_bytes;
      uint32_t exponents[2][2] = {};  // of the step that is being multiplied: of its two blocks, even rows and odd ones
      float d[kN / 2] = {};
      float sums[2][kN / 2];  // of the two blocks of a step
      uint32_t a[2][2][4];    // while one step is multiplied the next is unpacked
      // Wait for the products of a step and add them up, times the scales of their blocks.
      auto add = [&] {
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          settle(sums[b]);
          const float first = __uint_as_float(exponents[b][0] << 23), second = __uint_as_float(exponents[b][1] << 23);
#pragma unroll
          for (int i = 0; i < kN / 2; ++i) d[i] += sums[b][i] * (i & 2 ? second : first);
        }
      };
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        mbarrier_wait(full + 8 * stage, parity);
        const uint32_t source = lane_codes + stage * kChunkBytes;
        uint4 codes[4];
#pragma unroll
        for (int s = 0; s < 4; ++s) codes[s] = load_matrices(source ^ (32 * s));
        if (++stage == kStages) stage = 0, parity ^= 1;
        // Once the chunk has arrived in registers it may be filled anew.
        named_sync_after(1 + group, 128, codes[0].x, codes[1].x, codes[2].x, codes[3].x);
        if (is_issuer) issue();
        const bool is_last = chunk == kChunks - 1;
        const uint32_t x_tile = x_at + chunk * (4 * kN * 128 / 16);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          if (s >= kLastSteps && is_last) break;
          uint32_t(&now)[2][4] = a[s & 1];
          codes_to_e4m3(codes[s].x, now[0][0], now[0][2]);
          codes_to_e4m3(codes[s].y, now[0][1], now[0][3]);
          codes_to_e4m3(codes[s].z, now[1][0], now[1][2]);
          codes_to_e4m3(codes[s].w, now[1][1], now[1][3]);
          settle_words(now);  // before the wait, not after it
          if (s > 0 || chunk > 0) add();
          wgmma_fence();
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            const uint32_t x_block = x_tile + ((s >> 1) * 2 * kN * 128 + (2 * (s & 1) + b) * 32) / 16;
            wgmma_e4m3_narrow<kN, false>(sums[b], now[b], whole_descriptor(x_block));
            wgmma_e4m3_narrow<kN, true>(sums[b], now[b], whole_descriptor(x_block + kN * 128 / 16));
          }
          wgmma_commit();
          // Asked for while the products run.
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            exponents[b][0] = scales[2 * s + b + first_offset], exponents[b][1] = scales[2 * s + b + second_offset];
          }
        }
        scales += 8;
      }
      add();
      finish_split_tile<kN, kGateUp>(c, h, own - number * run.tiles, d, order, factors);
      buffer ^= 1;
    }
    item = last;
  }
  if constexpr (!kGateUp) {
    if (!has_waited) {
      wait_for_kernel_before();
      let_next_kernel_start();
    }
  }
}

}  // namespace rose::moe_decode
