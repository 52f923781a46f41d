// Experts of small batches on Hopper, 64 rows at a time: codes pass from memory through registers into wgmma.
//
// A tile is 64 rows of one expert's matrix. A warpgroup unpacks it once, whatever the number of tokens up to kN, and
// multiplies it as operand A in registers; the activations of the expert's tokens are operand B in shared memory, read
// once per 64 rows by the tensor cores themselves. Tiles are dealt out to blocks in contiguous runs; warpgroups of a
// block take turns at the tiles of a run, which share the activations.
//
// Columns inside a product may come in any order. A lane takes 16 bytes of codes, a block of 32 columns, as they lie;
// in 128 columns that is block t of row 2g and of row 2g + 1 of its warp's 16 rows (so that a gate and its up meet in
// one thread). Product 2i + h of the eight then has codes {0, 4, 1, 5} (h = 0) or {2, 6, 3, 7} (h = 1) of word i of the
// four lanes' blocks, and activations are stored to shared memory in that order.
#pragma once

#include "decode_stream.cuh"
#include "decode_warpgroup_ptx.cuh"
#include "wgmma_narrow.cuh"

namespace rose::moe_decode {

constexpr int kTileRows = 64;
constexpr int kAhead = 4;  // groups of 128 columns that are loaded ahead

// What the next kernel will read, to be fetched into L2 while this one ends; codes null: nothing.
struct Next {
  const uint8_t* codes;
  int rows, columns;
};

struct WideLayout {
  int groups, x, scale_bytes, scales, last, counts, hits, order, total;

  template <int kN, int kGroups>
  __host__ __device__ static WideLayout make(const Call& c) {
    WideLayout l;
    l.groups = (c.columns + 127) / 128;
    l.x = 0;
    l.scale_bytes = kTileRows * (c.columns / 32);
    l.scales = l.groups * kN * 256;
    l.last = l.scales + 2 * kGroups * l.scale_bytes;
    l.hits = l.last + 16 * kGroups;
    int most = (c.pairs < c.experts ? c.pairs : c.experts) + c.pairs / kN + 1;
    l.counts = l.hits + most * 16;
    l.order = l.counts + (c.experts + 1) * 4;
    l.total = l.order + c.pairs * 4;
    return l;
  }
};

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

// The groups of 128 columns of a tile, which pass through kAhead registers in turn; a tile fills them up with groups of
// nothing, so that the next one begins at the first again.
template <int kColumns>
struct Groups {
  static constexpr int kAll = (kColumns + 127) / 128, kRounds = (kAll + kAhead - 1) / kAhead;
  static constexpr int kInLastRound = kAll - kAhead * (kRounds - 1);
  static constexpr int kLanesOfLast = (kColumns % 128 == 0 ? 128 : kColumns % 128) / 32;
  static_assert(kColumns % 32 == 0 && kAll > kAhead, "rows too short for the ring");

  static __device__ __forceinline__ bool is_in(int round, int slot) { return round < kRounds - 1 || slot < kInLastRound; }
  // HAZARD: the last lanes of a quad keep older codes in a last group that is not whole: they meet activations of zero.
  static __device__ __forceinline__ bool has_lane(int round, int slot, int t) {
    if (kLanesOfLast == 4) return true;
    return round < kRounds - 1 || slot != kInLastRound - 1 || t < kLanesOfLast;
  }
};

template <int kColumns>
__device__ __forceinline__ void load_codes(Codes& v, const uint8_t* lane_codes, int slot) {
  v.low = load_once(lane_codes + slot * 64);
  v.high = load_once(lane_codes + kColumns / 2 + slot * 64);
}

// Write SwiGLU or output rows of a tile. Thread (g, t) of a warp has rows 2g and 2g + 1 of the warp's 16 for tokens
// 8j + 2t and 8j + 2t + 1.
template <int kN, bool kGateUp>
__device__ __forceinline__ void finish_tile(const Call& c, const int4& hit, int tile, const float (&d)[kN / 2],
                                            const uint16_t* order) {
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

// The last of all hits to finish 64 rows adds up the chosen experts of every token, the first choice first.
__device__ __forceinline__ void add_up_tile_if_last(const Call& c, int tile, int num_hits, volatile int* last) {
  const int thread = threadIdx.x & 127, barrier = 1 + (threadIdx.x >> 7);
  __threadfence();
  named_sync(barrier, 128);
  if (thread == 0) *last = atomicAdd(c.counters + tile, 1) == num_hits - 1;
  named_sync(barrier, 128);
  if (*last == 0) return;
  __threadfence();
  const int tokens = c.pairs / c.chosen;
  for (int i = thread; i < tokens * kTileRows; i += 128) {
    const int token = i / kTileRows, row = tile * kTileRows + i % kTileRows;
    float total = 0.0f;
    for (int k = 0; k < c.chosen; ++k) {
      const int pair = token * c.chosen + k;
      if (c.ids[pair] >= 0) {
        total += __bfloat162float(c.weights[pair]) * __ldcg(c.y + static_cast<size_t>(pair) * c.rows + row);
      }
    }
    c.out[static_cast<size_t>(token) * c.rows + row] = __float2bfloat16(total);
  }
}

// Fetch this block's share of the next kernel's codes into L2.
__device__ __forceinline__ void fetch_next(const Next& next, const int4* hits, int num_hits) {
  const int tiles = next.rows / kTileRows, total = num_hits * tiles;
  int item = static_cast<int64_t>(total) * blockIdx.x / gridDim.x;
  const int end = static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x;
  while (item < end) {
    const int hit = item / tiles, first = item - hit * tiles, last = min(end - hit * tiles, tiles);
    const int row_bytes = next.columns / 2;
    const size_t row = static_cast<size_t>(hits[hit].x) * next.rows + first * kTileRows;
    prefetch_bulk(next.codes + row * row_bytes, (last - first) * kTileRows * row_bytes);
    item = hit * tiles + last;
  }
}

// Grid: any number of blocks.
template <bool kGateUp, int kN, int kGroups, int kColumns>
__global__ void __launch_bounds__(kGroups * 128, 1) warpgroup_kernel(const Call c, const Next next) {
  using Ring = Groups<kColumns>;
  constexpr int kThreads = kGroups * 128, blocks = kColumns / 32, row_bytes = kColumns / 2;
  extern __shared__ __align__(1024) uint8_t shared[];
  const WideLayout l = WideLayout::make<kN, kGroups>(c);
  int4* hits = reinterpret_cast<int4*>(shared + l.hits);
  uint16_t* order = reinterpret_cast<uint16_t*>(shared + l.order);
  int* counts = reinterpret_cast<int*>(shared + l.counts);
  const int group = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  volatile int* last_flag = reinterpret_cast<int*>(shared + l.last) + 4 * group;

  if constexpr (kGateUp) {
    wait_for_kernel_before();
    // HAZARD: down reads ids before it waits for this kernel. It may: it starts after this line, so the router is done.
    let_next_kernel_start();
    if (c.counters != nullptr && blockIdx.x == 0) {
      for (int i = threadIdx.x; i < c.num_counters; i += kThreads) c.counters[i] = 0;
    }
  }
  list_hits<kN, kThreads>(c, hits, counts, order, counts + c.experts);
  const int num_hits = counts[c.experts], tiles = c.rows / kTileRows, total = num_hits * tiles;
  const int begin = static_cast<int64_t>(total) * blockIdx.x / gridDim.x;
  const int end = static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x;

  const uint32_t scales_at = shared_address(shared + l.scales) + group * 2 * l.scale_bytes;
  const uint8_t* own_scales = shared + l.scales + group * 2 * l.scale_bytes + (warp * 16 + 2 * g) * blocks + t;
  auto copy_scales = [&](const int4& h, int tile, int buffer) {
    const size_t row = static_cast<size_t>(h.x) * c.rows + tile * kTileRows;
    const uint8_t* source = static_cast<const uint8_t*>(c.scales) + row * blocks;
    for (int i = threadIdx.x & 127; i < l.scale_bytes / 16; i += 128) {
      copy_async(scales_at + buffer * l.scale_bytes + i * 16, source + i * 16);
    }
    copy_async_commit();
  };
  auto codes_of = [&](const int4& h, int tile) {
    const size_t row = static_cast<size_t>(h.x) * c.rows + tile * kTileRows + warp * 16 + 2 * g;
    return c.codes + row * row_bytes + t * 16;
  };

  bool has_waited = kGateUp;
  int buffer = 0;
  for (int item = begin; item < end;) {
    const int number = item / tiles, first = item - number * tiles, last = min(end - number * tiles, tiles);
    const int4 h = hits[number];
    Codes ahead[kAhead];
    int tile = first + group;
    const uint8_t* codes = codes_of(h, min(tile, last - 1));
    if (tile < last) {
      copy_scales(h, tile, buffer);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_codes<kColumns>(ahead[i], codes, i);
    }
    if (!has_waited) {
      wait_for_kernel_before();
      let_next_kernel_start();
      has_waited = true;
    }
    if (item != begin) __syncthreads();  // everybody has done with the activations of the hit before
    load_operand<kN, kGateUp, kThreads>(c, h, order, shared, l.groups);
    fence_proxy_async();
    __syncthreads();
    const uint64_t x_at = descriptor_swizzle128(shared_address(shared));
    for (; tile < last; tile += kGroups) {
      const bool has_next = tile + kGroups < last;
      const uint8_t* codes_next = codes_of(h, has_next ? tile + kGroups : tile);
      copy_async_wait();
      named_sync(1 + group, 128);
      const uint8_t* scales = own_scales + buffer * l.scale_bytes;
      buffer ^= 1;
      if (has_next) copy_scales(h, tile + kGroups, buffer);
      float d[kN / 2] = {};
      uint32_t a[2][4][4];
      uint64_t x_tile = x_at;
#pragma unroll 1
      for (int round = 0; round < Ring::kRounds; ++round) {
        const bool ends = round == Ring::kRounds - 1;
        const uint8_t* later = ends ? codes_next : codes + (round + 1) * kAhead * 64;
#pragma unroll
        for (int slot = 0; slot < kAhead; ++slot) {
          if (Ring::is_in(round, slot)) {
            const int place = Ring::has_lane(round, slot, t) ? 4 * slot : 0;
            const uint32_t scale_low = (scales[place] * 128 + 62 * 128) * 0x10001u;
            const uint32_t scale_high = (scales[place + blocks] * 128 + 62 * 128) * 0x10001u;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              wgmma_wait<1>();  // the products before the last ones: `a[half]` is free
              settle(d);
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                uint32_t low[4], high[4];
                unpack_e2m1(word(ahead[slot].low, 2 * half + i), scale_low, low);
                unpack_e2m1(word(ahead[slot].high, 2 * half + i), scale_high, high);
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                  a[half][2 * i + p][0] = low[2 * p], a[half][2 * i + p][1] = high[2 * p];
                  a[half][2 * i + p][2] = low[2 * p + 1], a[half][2 * i + p][3] = high[2 * p + 1];
                }
              }
              wgmma_fence();
#pragma unroll
              for (int step = 0; step < 4; ++step) {
                wgmma_narrow<kN>(d, a[half][step], advance(x_tile, (2 * slot + half) * kN * 128 + step * 32));
              }
              wgmma_commit();
            }
          }
          if (ends ? has_next : Ring::is_in(round + 1, slot) && Ring::has_lane(round + 1, slot, t)) {
            load_codes<kColumns>(ahead[slot], later, slot);
          }
        }
        scales += 4 * kAhead;
        x_tile = advance(x_tile, 2 * kAhead * kN * 128);
      }
      wgmma_wait<0>();
      settle(d);
      codes = codes_next;
      finish_tile<kN, kGateUp>(c, h, tile, d, order);
      if constexpr (!kGateUp) {
        if (c.counters != nullptr) add_up_tile_if_last(c, tile, num_hits, last_flag);
      }
    }
    item = number * tiles + last;
  }
  if constexpr (kGateUp) {
    if (next.codes != nullptr && threadIdx.x == 0) fetch_next(next, hits, num_hits);
  } else {
    if (!has_waited) {
      wait_for_kernel_before();
      let_next_kernel_start();
    }
    if (c.counters != nullptr && num_hits == 0) {
      const int tokens = c.pairs / c.chosen;
      for (int i = blockIdx.x * kThreads + threadIdx.x; i < tokens * c.rows; i += gridDim.x * kThreads) {
        c.out[i] = __float2bfloat16(0.0f);
      }
    }
  }
}

}  // namespace rose::moe_decode
