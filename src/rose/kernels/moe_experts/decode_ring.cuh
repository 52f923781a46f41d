// Experts of small batches on Hopper, 64 rows at a time: codes pass from memory through a ring in shared memory into
// registers and wgmma.
//
// decode_chunks.cuh says how tiles of 64 rows are dealt out and how their codes arrive. A warpgroup unpacks a tile once,
// whatever the number of tokens up to kN, and multiplies it as operand A in registers; the activations of the expert's
// tokens are operand B in shared memory, read once per 64 rows by the tensor cores themselves.
//
// Columns inside a product may come in any order. A lane takes 16 bytes of codes, a block of 32 columns, as they lie;
// in 128 columns that is block t of an even row and of the next of its warp's 16 rows (so that a gate and its up meet
// in one thread). Product 2i + h of the eight then has codes {0, 4, 1, 5} (h = 0) or {2, 6, 3, 7} (h = 1) of word i of the
// four lanes' blocks, and activations are stored to shared memory in that order.
#pragma once

#include "decode_chunks.cuh"

namespace rose::moe_decode {

// Copy the activations of a hit to shared memory: tiles of 64 columns by kN rows, K-major with 128-byte swizzle.
template <int kN, bool kGateUp, int kThreads>
__device__ __forceinline__ void load_operand(const Call& c, const int4& hit, const uint16_t* order, uint8_t* x_shared,
                                             int groups) {
  const int blocks = c.columns / 32, total = hit.z * groups * 4;
  for (int i = threadIdx.x; i < total; i += kThreads) {
    const int word = i & 3, group = (i >> 2) % groups, row = (i >> 2) / groups;
    const int pair = order[hit.y + row];
    const __nv_bfloat16* source = c.x + static_cast<size_t>(kGateUp ? pair / c.chosen : pair) * c.columns + word * 8;
    uint4 v[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int block = 4 * group + t;
      v[t] = uint4{0, 0, 0, 0};
      if (block < blocks) v[t] = __ldcg(reinterpret_cast<const uint4*>(source + block * 32));
    }
    // Step 2 * word + half of eight lies in tile 2 * group + word / 2; it is two chunks of 16 bytes.
    uint8_t* target = x_shared + ((2 * group + (word >> 1)) * kN + row) * 128;
    const int turn = row & 7, first = 4 * (word & 1);
    uint4 q[4];
    uint32_t* low = &q[0].x;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      // Columns (0, 4), (1, 5), (2, 6), (3, 7) of the lane's eight.
      low[t] = __byte_perm(v[t].x, v[t].z, 0x5410), low[4 + t] = __byte_perm(v[t].x, v[t].z, 0x7632);
      low[8 + t] = __byte_perm(v[t].y, v[t].w, 0x5410), low[12 + t] = __byte_perm(v[t].y, v[t].w, 0x7632);
    }
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      *reinterpret_cast<uint4*>(target + ((first + chunk) ^ turn) * 16) = q[chunk];
    }
  }
}

// A lane's codes of 128 columns: block t of its two rows.
struct Codes {
  uint4 low, high;
};

// Write SwiGLU or output rows of a tile. Thread (g, t) of a warp has rows 2 * place and 2 * place + 1 of the warp's 16
// for tokens 8j + 2t and 8j + 2t + 1.
template <int kN, bool kGateUp>
__device__ __forceinline__ void finish_tile(const Call& c, const int4& hit, int tile, const float (&d)[kN / 2],
                                                   const uint16_t* order, int place) {
  const int t = threadIdx.x & 3, warp = (threadIdx.x >> 5) & 3;
  const int row = tile * kTileRows + warp * 16 + 2 * place;
  const uint32_t bias = *reinterpret_cast<const uint32_t*>(c.bias + static_cast<size_t>(hit.x) * c.rows + row);
  const float bias_even = __uint_as_float(bias << 16), bias_odd = __uint_as_float(bias & 0xFFFF0000u);
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * j + 2 * t + i;
      if (token >= hit.z) continue;
      const size_t pair = order[hit.y + token];
      const float even = d[4 * j + i] * kCodeScale + bias_even, odd = d[4 * j + 2 + i] * kCodeScale + bias_odd;
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
    ring_kernel(const Call c, const __grid_constant__ CUtensorMap codes_map) {
  constexpr int kThreads = kGroups * 128, blocks = kColumns / 32;
  constexpr int kColumnGroups = (kColumns + 127) / 128, kChunks = (kColumnGroups + 1) / 2;
  extern __shared__ __align__(1024) uint8_t shared[];
  const RingLayout l = RingLayout::make<kN, kGroups, kStages>(c);
  int4* hits = reinterpret_cast<int4*>(shared + l.hits);
  uint16_t* order = reinterpret_cast<uint16_t*>(shared + l.order);
  int* counts = reinterpret_cast<int*>(shared + l.counts);
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
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

  // Rows of neighbouring g lie 4 apart mod 8, so that eight lanes of two rows meet different banks.
  const int place = (g & 4) | (g & 1) << 1 | (g >> 1 & 1);
  const int row = warp * 16 + 2 * place, turn = row & 7;
  const uint8_t* lane_codes = shared + group * kStages * kChunkBytes + row * 128;
  const uint8_t* lane_scales = shared + l.scales + group * 2 * l.scale_bytes + row * blocks + t;

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
    if (item != run.begin) __syncthreads();  // everybody has done with the activations of the hit before
    load_operand<kN, kGateUp, kThreads>(c, h, order, shared + l.x, kColumnGroups);
    fence_proxy_async();
    __syncthreads();
    const uint32_t x_at = descriptor_low(shared_address(shared + l.x));
    // Items of a run go round the warpgroups whatever the hit.
    for (int own = item + (group + kGroups - (item - run.begin) % kGroups) % kGroups; own < last; own += kGroups) {
      const uint8_t* scales = lane_scales + buffer * l.scale_bytes;
      buffer ^= 1;
      float d[kN / 2] = {};
      uint32_t a[2][4][4];
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        mbarrier_wait(full + 8 * stage, parity);
        const uint8_t* source = lane_codes + stage * kChunkBytes;
        Codes codes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          codes[i].low = *reinterpret_cast<const uint4*>(source + ((4 * i + t) ^ turn) * 16);
          codes[i].high = *reinterpret_cast<const uint4*>(source + 128 + ((4 * i + t) ^ turn ^ 1) * 16);
        }
        if (++stage == kStages) stage = 0, parity ^= 1;
        const bool is_last = chunk == kChunks - 1;
        const uint32_t x_tile = x_at + chunk * (4 * kN * 128 / 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i == 1 && kColumnGroups % 2 == 1 && is_last) break;
          // Past the last block the codes are zero, and any scale will do.
          const int past = is_last && 4 * (2 * (kChunks - 1) + i) + t >= blocks ? 4 * i + t : 0;
          const uint32_t scale_low = (scales[4 * i - past] * 128 + 62 * 128) * 0x10001u;
          const uint32_t scale_high = (scales[4 * i - past + blocks] * 128 + 62 * 128) * 0x10001u;
          if (i == 0) {
            // Once the chunk has arrived in registers it may be filled anew.
            named_sync_after(1 + group, 128, codes[0].low.x, codes[0].high.x, codes[1].low.x, codes[1].high.x, scale_low,
                             scale_high);
            if (is_issuer) issue();
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            wgmma_wait<1>();  // the products before the last ones: `a[half]` is free
            settle(d);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              uint32_t low[4], high[4];
              unpack_e2m1(word(codes[i].low, 2 * half + k), scale_low, low);
              unpack_e2m1(word(codes[i].high, 2 * half + k), scale_high, high);
#pragma unroll
              for (int p = 0; p < 2; ++p) {
                a[half][2 * k + p][0] = low[2 * p], a[half][2 * k + p][1] = high[2 * p];
                a[half][2 * k + p][2] = low[2 * p + 1], a[half][2 * k + p][3] = high[2 * p + 1];
              }
            }
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
              wgmma_narrow<kN>(d, a[half][step], whole_descriptor(x_tile + ((2 * i + half) * kN * 128 + step * 32) / 16));
            }
            wgmma_commit();
          }
        }
        scales += 8;
      }
      wgmma_wait<0>();
      settle(d);
      finish_tile<kN, kGateUp>(c, h, own - number * run.tiles, d, order, place);
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
