// Experts of small batches on Hopper: weights pass once from memory through shared memory into mma.m16n8k16.
//
// A unit is 16 rows of one expert's matrix, which lie together in memory: one bulk copy of codes and one of scales.
// Units are dealt out to persistent blocks in contiguous runs. In a block, warps share out the columns of each unit;
// one more warp keeps the ring of stages full, adds up the warps' parts and writes the result. Activations of the
// expert's tokens stay in shared memory until the run reaches the next expert.
//
// Columns inside a product may come in any order, so a lane's 16 bytes of codes are fragments of operand A as they
// stand, once unpacked; activations are stored to shared memory in the same order.
#pragma once

#include <type_traits>

#include "decode_call.cuh"
#include "mbarrier.cuh"

namespace rose::moe_decode {

constexpr int kUnitRows = 16;
constexpr int kParts = 2;  // buffers of partial sums

// Bytes of one stage and of all shared memory; host and device agree on them.
struct Layout {
  int code_bytes, scale_bytes, stage_bytes, x_stride, x, parts, barriers, counts, hits, order, total;

  template <bool kIsFp8, int kWarps, int kTiles>
  __host__ __device__ static Layout make(const Call& c) {
    Layout l;
    l.code_bytes = kUnitRows * c.columns / (kIsFp8 ? 1 : 2);
    l.scale_bytes = kIsFp8 ? 0 : kUnitRows * c.columns / 32;
    l.stage_bytes = l.code_bytes + l.scale_bytes;
    int chunks = c.columns / 8;
    // Rows of tokens lie 2 (fp8: 1) mod 8 chunks apart, so that eight lanes of two tokens meet different banks.
    l.x_stride = (chunks + (((kIsFp8 ? 1 : 2) - chunks) & 7)) * 16;
    l.x = c.stages * l.stage_bytes;
    l.parts = l.x + c.x_rows * l.x_stride;
    l.barriers = l.parts + kParts * kWarps * kTiles * 512;
    l.hits = l.barriers + ((c.stages + 2 * kParts) * 8 + 15) / 16 * 16;
    int most = (c.pairs < c.experts ? c.pairs : c.experts) + c.pairs / (8 * kTiles) + 1;
    l.counts = l.hits + most * 16;
    l.order = l.counts + (c.experts + 1) * 4;
    l.total = l.order + c.pairs * 4;
    return l;
  }
};

// Copy the activations of a hit to shared memory, in the order that products read them.
template <bool kIsFp8, bool kGateUp, int kThreads>
__device__ __forceinline__ void load_tokens(const Call& c, const int4& hit, const uint16_t* order, uint8_t* x_shared,
                                            int x_stride) {
  const int chunks = c.columns / 8, total = hit.z * chunks;
  constexpr int kBatch = 4;
  for (int base = threadIdx.x; base < total; base += kBatch * kThreads) {
    uint4 v[kBatch];
    int place[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int i = base + u * kThreads;
      if (i < total) {
        const int row = i / chunks, chunk = i % chunks;
        const int pair = order[hit.y + row];
        const size_t source = static_cast<size_t>(kGateUp ? pair / c.chosen : pair) * c.columns + chunk * 8;
        v[u] = __ldcg(reinterpret_cast<const uint4*>(c.x + source));
        // mxfp4: a lane's block of 32 columns is 4 chunks; fp8: its 16 columns are 2. Lanes 2 and 3 of a quad read
        // their chunks the other way round, or they would meet the banks of lanes 0 and 1.
        const int turned = kIsFp8 ? chunk : chunk ^ ((chunk >> 3) & 1);
        place[u] = row * x_stride + turned * 16;
      }
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (base + u * kThreads < total) {
        uint4 w;
        if constexpr (kIsFp8) {
          // Pairs (0, 2), (1, 3), (4, 6), (5, 7).
          w.x = __byte_perm(v[u].x, v[u].y, 0x5410), w.y = __byte_perm(v[u].x, v[u].y, 0x7632);
          w.z = __byte_perm(v[u].z, v[u].w, 0x5410), w.w = __byte_perm(v[u].z, v[u].w, 0x7632);
        } else {
          // Pairs (0, 4), (1, 5), (2, 6), (3, 7).
          w.x = __byte_perm(v[u].x, v[u].z, 0x5410), w.y = __byte_perm(v[u].x, v[u].z, 0x7632);
          w.z = __byte_perm(v[u].y, v[u].w, 0x5410), w.w = __byte_perm(v[u].y, v[u].w, 0x7632);
        }
        *reinterpret_cast<uint4*>(x_shared + place[u]) = w;
      }
    }
  }
}

// This warp's share of a unit: 16 rows by kT * 8 tokens. Row g of a product is row 2g of the unit, row g + 8 is row
// 2g + 1, so that a gate and its up meet in one lane (and rows lie 64 bytes mod 128 apart in shared memory).
//
// With kColumns known (mxfp4 only) all codes of the share are asked for at once and no step asks whether it is in.
template <bool kIsFp8, int kWarps, int kT, int kColumns>
__device__ __forceinline__ void multiply_unit(float (&acc)[kT][2][4], const Call& c, const uint8_t* stage, int code_bytes,
                                              const float* tile_scales, const uint8_t* x_shared, int x_stride,
                                              int num_tokens) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
  // Columns of the product past the last token repeat it; nobody looks at them.
  const uint8_t* tokens[kT];
#pragma unroll
  for (int n = 0; n < kT; ++n) tokens[n] = x_shared + min(n * 8 + g, num_tokens - 1) * x_stride;
  if constexpr (kColumns > 0) {
    constexpr int kBlocks = kColumns / 32, kSteps = (kBlocks + 4 * kWarps - 1) / (4 * kWarps);
    const uint8_t* codes = stage + 2 * g * (kColumns / 2);
    const uint8_t* scales = stage + code_bytes + 2 * g * kBlocks;
    const int turn = (t >> 1) & 1;
    uint4 low[kSteps], high[kSteps];
    uint32_t scale_low[kSteps], scale_high[kSteps];
    int place[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int block = 4 * (warp + s * kWarps) + t;
      const bool is_in = 4 * kWarps * (s + 1) <= kBlocks || block < kBlocks;
      place[s] = is_in ? block : kBlocks - 1;
      low[s] = *reinterpret_cast<const uint4*>(codes + place[s] * 16);
      high[s] = *reinterpret_cast<const uint4*>(codes + kColumns / 2 + place[s] * 16);
      // Past the last block: its codes once more, times zero.
      scale_low[s] = is_in ? scales[place[s]] * 0x800080u + 0x1F001F00u : 0;
      scale_high[s] = is_in ? scales[kBlocks + place[s]] * 0x800080u + 0x1F001F00u : 0;
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (4 * (warp + s * kWarps) >= kBlocks) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t a[4], b[4];
        unpack_e2m1(word(low[s], i), scale_low[s], a);
        unpack_e2m1(word(high[s], i), scale_high[s], b);
#pragma unroll
        for (int n = 0; n < kT; ++n) {
          const uint4 q = *reinterpret_cast<const uint4*>(tokens[n] + place[s] * 64 + ((i ^ turn) * 16));
          mma(acc[n][0], a[0], b[0], a[1], b[1], q.x, q.y);
          mma(acc[n][1], a[2], b[2], a[3], b[3], q.z, q.w);
        }
      }
    }
  } else if constexpr (!kIsFp8) {
    const int blocks = c.columns / 32, row_bytes = c.columns / 2;
    const uint8_t* codes = stage + 2 * g * row_bytes;
    const uint8_t* scales = stage + code_bytes + 2 * g * blocks;
    const int turn = (t >> 1) & 1;
    for (int first = 4 * warp; first < blocks; first += 4 * kWarps) {
      const int block = first + t;
      const bool is_in = block < blocks;
      uint4 low = {}, high = {};
      uint32_t scale_low = 0, scale_high = 0;
      if (is_in) {
        low = *reinterpret_cast<const uint4*>(codes + block * 16);
        high = *reinterpret_cast<const uint4*>(codes + row_bytes + block * 16);
        scale_low = scales[block];
        scale_high = scales[blocks + block];
      }
      scale_low = (scale_low * 128 + 62 * 128) * 0x10001u;
      scale_high = (scale_high * 128 + 62 * 128) * 0x10001u;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t a[4], b[4];
        unpack_e2m1(word(low, i), scale_low, a);
        unpack_e2m1(word(high, i), scale_high, b);
#pragma unroll
        for (int n = 0; n < kT; ++n) {
          uint4 q = {};
          if (is_in) {
            q = *reinterpret_cast<const uint4*>(tokens[n] + block * 64 + ((i ^ turn) * 16));
          }
          mma(acc[n][0], a[0], b[0], a[1], b[1], q.x, q.y);
          mma(acc[n][1], a[2], b[2], a[3], b[3], q.z, q.w);
        }
      }
    }
  } else {
    const int blocks = c.columns / 16, row_bytes = c.columns;
    const uint8_t* codes = stage + 2 * g * row_bytes;
    for (int first = 4 * warp; first < blocks; first += 4 * kWarps) {
      const int block = first + t;
      const bool is_in = block < blocks;
      uint4 low = {}, high = {};
      uint32_t scale = 0;
      if (is_in) {
        low = *reinterpret_cast<const uint4*>(codes + block * 16);
        high = *reinterpret_cast<const uint4*>(codes + row_bytes + block * 16);
        // A multiplier is a power of two: its exponent, times 2^56 (2^120 of e4m3 in bf16 bits, less 2^64).
        scale = ((__float_as_uint(__ldg(tile_scales + (block >> 3))) >> 16) + 56 * 128) * 0x10001u;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4], b[4];
        unpack_e4m3(word(low, 2 * half), scale, a[0], a[1]);
        unpack_e4m3(word(low, 2 * half + 1), scale, a[2], a[3]);
        unpack_e4m3(word(high, 2 * half), scale, b[0], b[1]);
        unpack_e4m3(word(high, 2 * half + 1), scale, b[2], b[3]);
#pragma unroll
        for (int n = 0; n < kT; ++n) {
          uint4 q = {};
          if (is_in) q = *reinterpret_cast<const uint4*>(tokens[n] + block * 32 + half * 16);
          mma(acc[n][0], a[0], b[0], a[1], b[1], q.x, q.y);
          mma(acc[n][1], a[2], b[2], a[3], b[3], q.z, q.w);
        }
      }
    }
  }
}

// Add up the warps' parts of a unit and write SwiGLU or output rows. Lane (g, t) has rows 2g and 2g + 1 of the unit for
// tokens 2t and 2t + 1 of each tile.
template <int kWarps, int kTiles, bool kGateUp>
__device__ __forceinline__ void finish_unit(const Call& c, const int4& hit, int unit, const float4* parts,
                                            const uint16_t* order, float bias_even, float bias_odd) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (n * 8 >= hit.z) break;
    float4 sum = parts[n * 32 + lane];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      const float4 v = parts[(w * kTiles + n) * 32 + lane];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const float even[2] = {sum.x * kCodeScale + bias_even, sum.y * kCodeScale + bias_even};
    const float odd[2] = {sum.z * kCodeScale + bias_odd, sum.w * kCodeScale + bias_odd};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = n * 8 + 2 * t + i;
      if (token >= hit.z) continue;
      const size_t pair = order[hit.y + token];
      if constexpr (kGateUp) {
        const float gate = fminf(even[i], c.limit), up = fminf(fmaxf(odd[i], -c.limit), c.limit);
        const float a = gate / (1.0f + __expf(-c.alpha * gate)) * (up + 1.0f);
        c.act[pair * (c.rows / 2) + unit * 8 + g] = __float2bfloat16(a);
      } else {
        *reinterpret_cast<float2*>(c.y + pair * c.rows + unit * kUnitRows + 2 * g) = make_float2(even[i], odd[i]);
      }
    }
  }
}

// Grid: any number of blocks that are resident at once. kWarps products warps and one more. kColumns: 0 or c.columns.
template <bool kIsFp8, bool kGateUp, int kWarps, int kTiles, int kColumns>
__global__ void __launch_bounds__(kWarps * 32 + 32, kWarps == 8 ? 2 : 1) stream_kernel(const Call c) {
  constexpr int kThreads = kWarps * 32 + 32;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Layout l = Layout::make<kIsFp8, kWarps, kTiles>(c);
  int4* hits = reinterpret_cast<int4*>(shared + l.hits);
  uint16_t* order = reinterpret_cast<uint16_t*>(shared + l.order);
  const uint32_t full = shared_address(shared + l.barriers);
  const uint32_t part_full = full + 8 * c.stages, part_empty = part_full + 8 * kParts;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

  if (threadIdx.x == 0) {
    for (int s = 0; s < c.stages; ++s) mbarrier_init(full + 8 * s, 1);
    for (int s = 0; s < kParts; ++s) {
      mbarrier_init(part_full + 8 * s, kWarps * kWarpArrivals);
      mbarrier_init(part_empty + 8 * s, kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  if constexpr (kGateUp) {
    wait_for_kernel_before();
    // HAZARD: down reads ids before it waits for this kernel. It may: it starts after this line, so the router is done.
    let_next_kernel_start();
  }
  int* counts = reinterpret_cast<int*>(shared + l.counts);
  list_hits<8 * kTiles, kThreads>(c, hits, counts, order, counts + c.experts);
  const int num_hits = counts[c.experts], units = c.rows / kUnitRows, total = num_hits * units;
  const int begin = static_cast<int64_t>(total) * blockIdx.x / gridDim.x;
  const int end = static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x;

  if (warp == kWarps) {
    auto issue = [&](int item, int stage) {
      const int hit = item / units, unit = item - hit * units;
      const size_t row = static_cast<size_t>(hits[hit].x) * c.rows + unit * kUnitRows;
      const uint32_t target = shared_address(shared + stage * l.stage_bytes), barrier = full + 8 * stage;
      mbarrier_arrive_expect(barrier, l.stage_bytes);
      bulk_load(target, c.codes + row * (l.code_bytes / kUnitRows), l.code_bytes, barrier);
      if constexpr (!kIsFp8) {
        bulk_load(target + l.code_bytes, static_cast<const uint8_t*>(c.scales) + row * (c.columns / 32), l.scale_bytes,
                  barrier);
      }
    };
    if (lane == 0) {
      for (int s = 0; s < c.stages && begin + s < end; ++s) issue(begin + s, s);
    }
    if constexpr (!kGateUp) {
      wait_for_kernel_before();
      let_next_kernel_start();
    }
    int hit = begin / units, unit = begin - hit * units, stage = 0;
    for (int item = begin, k = 0; item < end; ++item, ++k) {
      const int4 h = hits[hit];
      const uint32_t bias = *reinterpret_cast<const uint32_t*>(c.bias + static_cast<size_t>(h.x) * c.rows +
                                                               unit * kUnitRows + 2 * (lane >> 2));
      const int buffer = k % kParts;
      mbarrier_wait(part_full + 8 * buffer, (k / kParts) & 1);
      if (lane == 0 && item + c.stages < end) issue(item + c.stages, stage);
      __syncwarp();
      const float4* parts = reinterpret_cast<const float4*>(shared + l.parts) + buffer * kWarps * kTiles * 32;
      finish_unit<kWarps, kTiles, kGateUp>(c, h, unit, parts, order, __uint_as_float(bias << 16),
                                           __uint_as_float(bias & 0xFFFF0000u));
      __syncwarp();
      mbarrier_arrive_warp(part_empty + 8 * buffer, lane);
      if (++stage == c.stages) stage = 0;
      if (++unit == units) unit = 0, ++hit;
    }
  } else {
    if constexpr (!kGateUp) {
      wait_for_kernel_before();
      let_next_kernel_start();
    }
    int hit = begin / units, unit = begin - hit * units, stage = 0, loaded = -1;
    uint32_t stage_parity = 0;
    for (int item = begin, k = 0; item < end; ++item, ++k) {
      const int4 h = hits[hit];
      if (hit != loaded) {
        if (loaded >= 0) named_sync(1, kWarps * 32);
        load_tokens<kIsFp8, kGateUp, kWarps * 32>(c, h, order, shared + l.x, l.x_stride);
        named_sync(1, kWarps * 32);
        loaded = hit;
      }
      const float* tile_scales = nullptr;
      if constexpr (kIsFp8) {
        const int scale_rows = (c.rows + 127) / 128, scale_columns = (c.columns + 127) / 128;
        tile_scales = static_cast<const float*>(c.scales) +
                      (static_cast<size_t>(h.x) * scale_rows + unit * kUnitRows / 128) * scale_columns;
      }
      mbarrier_wait(full + 8 * stage, stage_parity);
      const uint8_t* source = shared + stage * l.stage_bytes;
      const int buffer = k % kParts;
      float4* parts = reinterpret_cast<float4*>(shared + l.parts) + (buffer * kWarps + warp) * kTiles * 32 + lane;
      auto run = [&](auto tiles) {
        constexpr int kT = decltype(tiles)::value;
        float acc[kT][2][4] = {};
        multiply_unit<kIsFp8, kWarps, kT, kColumns>(acc, c, source, l.code_bytes, tile_scales, shared + l.x, l.x_stride, h.z);
        mbarrier_wait(part_empty + 8 * buffer, ((k / kParts) & 1) ^ 1);
#pragma unroll
        for (int n = 0; n < kT; ++n) {
          parts[n * 32] = make_float4(acc[n][0][0] + acc[n][1][0], acc[n][0][1] + acc[n][1][1],
                                      acc[n][0][2] + acc[n][1][2], acc[n][0][3] + acc[n][1][3]);
        }
      };
      if constexpr (kTiles == 1) {
        run(std::integral_constant<int, 1>{});
      } else {
        if (h.z <= 8) {
          run(std::integral_constant<int, 1>{});
        } else {
          run(std::integral_constant<int, kTiles>{});
        }
      }
      __syncwarp();
      mbarrier_arrive_warp(part_full + 8 * buffer, lane);
      if (++stage == c.stages) stage = 0, stage_parity ^= 1;
      if (++unit == units) unit = 0, ++hit;
    }
  }
}

}  // namespace rose::moe_decode
