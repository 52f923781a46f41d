// Grouped FP8 product for Hopper: C[rows of expert e] = bias[e] + A W[e]^T, with one of two epilogues.
//
// A persistent block of three warpgroups: two consumers own 64 rows each of a 128-row tile, one warp of the third
// fills a ring of shared-memory stages by TMA. A stage is 128 of K: rows of A, columns of W, scales of A.
// The tensor core sums one scale group into `part`; each thread then adds part * (scale of A * scale of W) to
// `total`, float32, which the bias seeds. With two consumers, one adds while the other's products run.
// Clusters: two blocks take two row tiles of one run of columns and read W once, half each, for both. A last tile
// without a partner is shared the other way: each block takes another run of columns.
// Tails: rows past the expert's are computed and not stored (a consumer with none of its rows in the tile skips
// its products); columns past N and K past its end read as zeros.
#pragma once

#include "launch.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma_fp8.cuh"

namespace rose::moe {

constexpr int kTileRows = 128;
constexpr int kBlockK = 128;
constexpr int kScaleBox = kTileRows + 4;  // a box starts at a multiple of 4 scales (16 bytes), up to 3 before the tile
constexpr int kBandTiles = 16;  // row tiles that share a run of columns before the next run: bounds L2's working set

struct Rows {
  const int* starts;  // [E + 1] first row of each expert
  const int* tiles;   // [E + 1] first tile of each expert
  const int* expert;  // [tiles] expert of each tile
  const int* pairs;   // [E + 1] first pair of tiles of each expert; an odd tile is in no pair
  int num_experts;
};

struct Grouped {
  CUtensorMap a, a_scales, w;
  Rows rows;
  const float* w_scales;  // [E, ceil(N / 128), ceil(K / 128)]
  const void* bias;       // [E, N]
  int bias_is_bf16;
  int n, k;
  // Gate-up: E4M3 [rows, N / 2] and its scales [groups, scales_stride].
  uint8_t* hidden;
  float* hidden_scales;
  int scales_stride;
  float alpha, limit;
  // Down: bf16 [rows, N].
  __nv_bfloat16* y;
};

// kGroup: columns of A that share a scale. kSub x kSubs: a consumer multiplies kSubs pieces of kSub columns in
// turn, so that only one piece of `part` is live. kStages: depth of the ring. kCluster: blocks that share W.
template <bool kGateUpP, int kGroupP, int kSubP, int kSubsP, int kStagesP, int kClusterP = 1>
struct Shape {
  static constexpr bool kGateUp = kGateUpP;
  static constexpr int kGroup = kGroupP, kSub = kSubP, kSubs = kSubsP, kStages = kStagesP;
  static constexpr int kCluster = kClusterP;
  static constexpr int kColumns = kSub * kSubs;
  static constexpr int kGroups = kBlockK / kGroup;
  // Weight scales change every 128 columns; a piece that does not start on one needs them every 64.
  static constexpr int kSegments = kSub % 128 == 0 ? kSub / 128 : kSub / 64;
  static constexpr int kSegment = kSub / kSegments;
  static constexpr int kHalfBytes = 64 * kBlockK;
  static constexpr int kABytes = 2 * kHalfBytes, kWBytes = kColumns * kBlockK;
  static constexpr int kScaleBytes = kGroups * kScaleBox * 4, kScaleStage = (kScaleBytes + 127) / 128 * 128;
  static constexpr int kRingBytes = kStages * (kABytes + kWBytes);
  static constexpr int kSharedBytes = 1024 + kRingBytes + kStages * kScaleStage;
  static_assert(kSharedBytes <= 227 * 1024 - 256, "more shared memory than a block can have");
  static_assert(kCluster == 1 || kCluster == 2, "clusters of one or two blocks");
  static_assert(!kGateUp || kSub == 128, "the gate-up epilogue handles pieces of 64 channels");
};

struct Item {
  int expert, row, rows, run;
  bool shares_w;  // both blocks of the cluster multiply this run of columns
};

constexpr int kMaxUnits = 129;  // experts + 1

// Order of work: expert by expert; kBandTiles row tiles inside one run of columns, then the next run. In a cluster
// the unit is a pair of tiles, then, for an odd tile, a pair of runs; `units` holds each expert's first unit.
template <int kCluster>
__device__ __forceinline__ Item locate(const Rows& rows, const int* units, int item, int runs, int rank) {
  Item found;
  int tile;
  if constexpr (kCluster == 1) {
    found.expert = __ldg(rows.expert + item / runs);
    const int first = __ldg(rows.tiles + found.expert);
    const int tiles = __ldg(rows.tiles + found.expert + 1) - first;
    int local = item - first * runs;
    const int band = local / (kBandTiles * runs);
    const int band_tiles = min(tiles - band * kBandTiles, kBandTiles);
    local -= band * kBandTiles * runs;
    found.run = local / band_tiles;
    tile = band * kBandTiles + local - found.run * band_tiles;
    found.shares_w = false;
  } else {
    int low = 0, high = rows.num_experts;  // units[low] <= item < units[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (units[middle] <= item) low = middle;
      else high = middle;
    }
    found.expert = low;
    const int pairs = __ldg(rows.pairs + low + 1) - __ldg(rows.pairs + low);
    int local = item - units[low];
    found.shares_w = local < pairs * runs;
    if (found.shares_w) {
      constexpr int kBandPairs = kBandTiles / 2;
      const int band = local / (kBandPairs * runs);
      const int band_pairs = min(pairs - band * kBandPairs, kBandPairs);
      local -= band * kBandPairs * runs;
      found.run = local / band_pairs;
      tile = 2 * (band * kBandPairs + local - found.run * band_pairs) + rank;
    } else {
      found.run = 2 * (local - pairs * runs) + rank;
      tile = 2 * pairs;
    }
  }
  found.row = __ldg(rows.starts + found.expert) + tile * kTileRows;
  found.rows = min(__ldg(rows.starts + found.expert + 1) - found.row, kTileRows);
  if (found.run >= runs) found.rows = 0;  // the odd tile's last run has no partner
  return found;
}

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Four words per lane of a quad, transposed: lane q receives word q of lanes 0..3.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int q) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t got = __shfl_xor_sync(0xffffffffu, (q & 1) ? w[i] : w[i + 1], 1);
    if (q & 1) w[i] = got;
    else w[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t got = __shfl_xor_sync(0xffffffffu, (q & 2) ? w[i] : w[i + 2], 2);
    if (q & 2) w[i] = got;
    else w[i + 2] = got;
  }
}

// The 4 x 4 bytes of four words, transposed: word i receives byte i of words 0..3.
__device__ __forceinline__ uint4 transpose_bytes(const uint32_t (&w)[4]) {
  uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
  uint32_t high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
  return {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632), __byte_perm(high01, high23, 0x5410),
          __byte_perm(high01, high23, 0x7632)};
}

// Every load is issued before the first is used: no branch inside, columns past N read the last pair.
template <typename S>
__device__ __forceinline__ void seed_with_bias(float (&total)[S::kSubs][S::kSub / 2], const Grouped& p,
                                               const Item& item, int q) {
  const size_t first = size_t(item.expert) * p.n;
  const int begin = item.run * S::kColumns + 2 * q;
  if (p.bias_is_bf16) {
    const __nv_bfloat16* bias = static_cast<const __nv_bfloat16*>(p.bias) + first;
#pragma unroll
    for (int s = 0; s < S::kSubs; ++s) {
#pragma unroll
      for (int j = 0; j < S::kSub / 8; ++j) {
        const int column = min(begin + s * S::kSub + 8 * j, p.n - 2);
        total[s][4 * j] = __uint_as_float(__ldg(reinterpret_cast<const uint32_t*>(bias + column)));
      }
    }
#pragma unroll
    for (int s = 0; s < S::kSubs; ++s) {
#pragma unroll
      for (int j = 0; j < S::kSub / 8; ++j) {
        const uint32_t pair = __float_as_uint(total[s][4 * j]);
        total[s][4 * j] = total[s][4 * j + 2] = __uint_as_float(pair << 16);
        total[s][4 * j + 1] = total[s][4 * j + 3] = __uint_as_float(pair & 0xffff0000u);
      }
    }
  } else {
    const float* bias = static_cast<const float*>(p.bias) + first;
#pragma unroll
    for (int s = 0; s < S::kSubs; ++s) {
#pragma unroll
      for (int j = 0; j < S::kSub / 8; ++j) {
        const int column = min(begin + s * S::kSub + 8 * j, p.n - 2);
        const float2 pair = __ldg(reinterpret_cast<const float2*>(bias + column));
        total[s][4 * j] = total[s][4 * j + 2] = pair.x;
        total[s][4 * j + 1] = total[s][4 * j + 3] = pair.y;
      }
    }
  }
}

__device__ __forceinline__ float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// Give a stage back. In a cluster the partner writes into it too, so that both producers have to know.
template <typename S>
__device__ __forceinline__ void release(uint32_t empty) {
  mbarrier_arrive(empty);
  if constexpr (S::kCluster == 2) mbarrier_arrive_remote(empty, cluster_rank() ^ 1);
}

// One stage: kSteps products of 32 along K for each piece, and their sums into `total`.
template <typename S, int kSteps>
__device__ __forceinline__ void multiply_stage(float (&total)[S::kSubs][S::kSub / 2], uint64_t a, uint64_t w,
                                               uint32_t a_scales, const float (&w_scale)[S::kSubs][S::kSegments],
                                               int subs, uint32_t empty, int lane) {
  constexpr int kGroupSteps = S::kGroup / 32;
  constexpr int kGroups = (kSteps + kGroupSteps - 1) / kGroupSteps;
  float part[S::kSub / 2];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const float scale0 = load_shared(a_scales + 4 * group * kScaleBox);
    const float scale1 = load_shared(a_scales + 4 * group * kScaleBox + 32);
#pragma unroll
    for (int s = 0; s < S::kSubs; ++s) {
      if (S::kSubs > 1 && s >= subs) break;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kGroupSteps; ++step) {
        const int at = group * kGroupSteps + step;
        if (at < kSteps) {
          wgmma_e4m3<S::kSub>(part, advance(a, at * 32), advance(w, s * S::kSub * kBlockK + at * 32), step > 0);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      settle(part);
      if (group == kGroups - 1 && s == subs - 1) {
        __syncwarp();
        if (lane == 0) release<S>(empty);
      }
float c0[S::kSegments], c1[S::kSegments];
#pragma unroll
      for (int segment = 0; segment < S::kSegments; ++segment) {
        c0[segment] = scale0 * w_scale[s][segment];
        c1[segment] = scale1 * w_scale[s][segment];
      }
#pragma unroll
      for (int j = 0; j < S::kSub / 8; ++j) {
        const int segment = 8 * j / S::kSegment;
        total[s][4 * j] += part[4 * j] * c0[segment];
        total[s][4 * j + 1] += part[4 * j + 1] * c0[segment];
        total[s][4 * j + 2] += part[4 * j + 2] * c1[segment];
        total[s][4 * j + 3] += part[4 * j + 3] * c1[segment];
      }
    }
  }
}

__device__ __forceinline__ float swiglu(float gate, float up, float alpha, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return __fdividef(gate, 1.f + __expf(-alpha * gate)) * (up + 1.f);
}

// Columns 2i and 2i + 1 are gate and up of channel i: neighbours in one thread's registers. The channels of a tile's
// row lie in the four lanes of a quad; they are one group of the output format.
template <typename S>
__device__ __forceinline__ void store_hidden(float (&total)[S::kSubs][S::kSub / 2], const Grouped& p,
                                             const Item& item, int row, int q, int subs) {
  const int inner = p.n / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float amax = 0.f;
#pragma unroll
    for (int s = 0; s < S::kSubs; ++s) {
#pragma unroll
      for (int j = 0; j < S::kSub / 8; ++j) {
        float& channel = total[s][4 * j + 2 * half];
        channel = swiglu(channel, total[s][4 * j + 2 * half + 1], p.alpha, p.limit);
        if (s < subs) amax = fmaxf(amax, fabsf(channel));
      }
    }
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    const float scale = fmaxf(amax, 1e-4f) / 448.f;
    const float inverse = 1.f / scale;
    const bool is_in = row + 8 * half < item.rows;
    const size_t at = item.row + row + 8 * half;
    if (is_in && q == 0) p.hidden_scales[size_t(item.run) * p.scales_stride + at] = scale;
#pragma unroll
    for (int s = 0; s < S::kSubs; ++s) {
      // Lane q holds channels 4j + q. Word t packs j = 4t .. 4t + 3; after both transpositions lane q holds
      // channels 16q .. 16q + 15 of the piece's 64.
      uint32_t words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float* d = &total[s][16 * t + 2 * half];
        words[t] = pack_e4m3(d[0] * inverse, d[4] * inverse, d[8] * inverse, d[12] * inverse);
      }
      transpose_quad(words, q);
      if (is_in && s < subs) {
        const int channel = (item.run * S::kSubs + s) * 64 + 16 * q;
        *reinterpret_cast<uint4*>(p.hidden + at * inner + channel) = transpose_bytes(words);
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void store_rows(const float (&total)[S::kSubs][S::kSub / 2], const Grouped& p,
                                           const Item& item, int row, int q) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool is_in = row + 8 * half < item.rows;
    __nv_bfloat16* out = p.y + size_t(item.row + row + 8 * half) * p.n;
#pragma unroll
    for (int s = 0; s < S::kSubs; ++s) {
#pragma unroll
      for (int t = 0; t < S::kSub / 32; ++t) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* d = &total[s][4 * (4 * t + i) + 2 * half];
          words[i] = pack_bf16(d[0], d[1]);
        }
        transpose_quad(words, q);
        const int column = item.run * S::kColumns + s * S::kSub + 32 * t + 8 * q;
        if (is_in && column < p.n) {
          *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void load_weight_scales(float (&scale)[S::kSubs][S::kSegments], const Grouped& p,
                                                   const Item& item, int k_block) {
  const int column_blocks = (p.n + 127) / 128, k_blocks = (p.k + 127) / 128;
#pragma unroll
  for (int s = 0; s < S::kSubs; ++s) {
#pragma unroll
    for (int segment = 0; segment < S::kSegments; ++segment) {
      int block = (item.run * S::kColumns + s * S::kSub + segment * S::kSegment) / 128;
      block = min(block, column_blocks - 1);
      scale[s][segment] = __ldg(p.w_scales + (size_t(item.expert) * column_blocks + block) * k_blocks + k_block);
    }
  }
}

template <typename S>
__device__ __forceinline__ void produce(const Grouped& p, const int* units, int num_items,
                                        uint32_t ring_base, uint32_t full, uint32_t empty) {
  const int runs = (p.n + S::kColumns - 1) / S::kColumns, k_blocks = (p.k + kBlockK - 1) / kBlockK;
  Ring<S::kStages> ring;
  const int rank = S::kCluster == 2 ? cluster_rank() : 0;
  tma_prefetch_map(&p.a);
  tma_prefetch_map(&p.a_scales);
  tma_prefetch_map(&p.w);
  for (int i = blockIdx.x / S::kCluster; i < num_items; i += gridDim.x / S::kCluster) {
    const Item item = locate<S::kCluster>(p.rows, units, i, runs, rank);
    const bool has_any = item.rows > 0, has_second = item.rows > 64;
    // A partner's half of W arrives at this block's barrier as well.
    const bool has_w = has_any || item.shares_w;
    const uint32_t bytes = (has_w ? S::kWBytes : 0) + (has_any ? S::kScaleBytes + S::kHalfBytes : 0) +
                           (has_second ? S::kHalfBytes : 0);
    for (int kb = 0; kb < k_blocks; ++kb, ring.next()) {
      mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      const uint32_t barrier = full + 8 * ring.stage;
      const uint32_t a = ring_base + ring.stage * (S::kABytes + S::kWBytes), w = a + S::kABytes;
      const int k = kb * kBlockK;
      mbarrier_arrive_expect(barrier, bytes);
      if (has_any) {
        tma_load_2d(a, &p.a, barrier, k, item.row);
        if (has_second) tma_load_2d(a + S::kHalfBytes, &p.a, barrier, k, item.row + 64);
        tma_load_2d(ring_base + S::kRingBytes + ring.stage * S::kScaleStage, &p.a_scales, barrier, item.row & ~3,
                    kb * S::kGroups);
      }
      if constexpr (S::kCluster == 1) {
        tma_load_3d(w, &p.w, barrier, k, item.run * S::kColumns, item.expert);
      } else {
        constexpr int kHalf = S::kColumns / 2;
        const int column = item.run * S::kColumns;
        if (item.shares_w) {
          tma_load_3d_multicast(w + rank * (S::kWBytes / 2), &p.w, barrier, k, column + rank * kHalf, item.expert, 3);
        } else if (has_any) {
          tma_load_3d(w, &p.w, barrier, k, column, item.expert);
          tma_load_3d(w + S::kWBytes / 2, &p.w, barrier, k, column + kHalf, item.expert);
        }
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void consume(const Grouped& p, const int* units, int num_items,
                                        uint32_t ring_base, uint32_t full, uint32_t empty) {
  const int runs = (p.n + S::kColumns - 1) / S::kColumns, k_blocks = (p.k + kBlockK - 1) / kBlockK;
  Ring<S::kStages> ring;
  const int rank = S::kCluster == 2 ? cluster_rank() : 0;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, q = lane % 4;
  const int row = warpgroup * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4;
  const int k_full = p.k / kBlockK;
  for (int i = blockIdx.x / S::kCluster; i < num_items; i += gridDim.x / S::kCluster) {
    const Item item = locate<S::kCluster>(p.rows, units, i, runs, rank);
    if (warpgroup * 64 >= item.rows) {
      for (int kb = 0; kb < k_blocks; ++kb, ring.next()) {
        mbarrier_wait(full + 8 * ring.stage, ring.parity);
        if (lane == 0) release<S>(empty + 8 * ring.stage);
      }
      continue;
    }
    const int subs = min(S::kSubs, (p.n - item.run * S::kColumns + S::kSub - 1) / S::kSub);
    float total[S::kSubs][S::kSub / 2];
    float w_scale[S::kSubs][S::kSegments], w_scale_next[S::kSubs][S::kSegments];
    load_weight_scales<S>(w_scale_next, p, item, 0);
    seed_with_bias<S>(total, p, item, q);
    for (int kb = 0; kb < k_blocks; ++kb, ring.next()) {
#pragma unroll
      for (int s = 0; s < S::kSubs; ++s) {
#pragma unroll
        for (int segment = 0; segment < S::kSegments; ++segment) w_scale[s][segment] = w_scale_next[s][segment];
      }
      load_weight_scales<S>(w_scale_next, p, item, min(kb + 1, k_blocks - 1));
      const uint32_t a = ring_base + ring.stage * (S::kABytes + S::kWBytes);
      const uint64_t a_descriptor = descriptor_swizzle128(a + warpgroup * S::kHalfBytes);
      const uint64_t w_descriptor = descriptor_swizzle128(a + S::kABytes);
      const uint32_t a_scales = ring_base + S::kRingBytes + ring.stage * S::kScaleStage + 4 * (row + (item.row & 3));
      const uint32_t back = empty + 8 * ring.stage;
      mbarrier_wait(full + 8 * ring.stage, ring.parity);
      if (kb < k_full) {
        multiply_stage<S, 4>(total, a_descriptor, w_descriptor, a_scales, w_scale, subs, back, lane);
      } else {
        multiply_stage<S, 2>(total, a_descriptor, w_descriptor, a_scales, w_scale, subs, back, lane);
      }
    }
    if constexpr (S::kGateUp) {
      store_hidden<S>(total, p, item, row, q, subs);
    } else {
      store_rows<S>(total, p, item, row, q);
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(384, 1) grouped(const __grid_constant__ Grouped p) {
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t barriers[2 * S::kStages];
  __shared__ int units[S::kCluster == 2 ? kMaxUnits : 1];
  const uint32_t ring_base = (shared_address(raw) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers), empty = full + 8 * S::kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, 8 * S::kCluster);  // one arrival per consumer warp of the cluster
    }
    mbarrier_init_fence();
  }
  const int runs = (p.n + S::kColumns - 1) / S::kColumns;
  int num_items;
  if constexpr (S::kCluster == 2) {
    if (threadIdx.x <= p.rows.num_experts) {
      const int pairs = __ldg(p.rows.pairs + threadIdx.x);
      const int odd = __ldg(p.rows.tiles + threadIdx.x) - 2 * pairs;
      units[threadIdx.x] = pairs * runs + odd * ((runs + 1) / 2);
    }
    __syncthreads();
    num_items = units[p.rows.num_experts];
    cluster_sync();  // the partner's barriers exist before anything is sent to them
  } else {
    __syncthreads();
    num_items = __ldg(p.rows.tiles + p.rows.num_experts) * runs;
  }
  if (threadIdx.x >= 256) {
    registers_shrink<40>();
    if (threadIdx.x == 256) produce<S>(p, units, num_items, ring_base, full, empty);
  } else {
    registers_grow<232>();
    consume<S>(p, units, num_items, ring_base, full, empty);
  }
  if constexpr (S::kCluster == 2) {
    __syncwarp();  // the producer's warp is whole again
    cluster_sync();  // until here the partner may send to this block's shared memory
  }
}

// Tensor maps and launch. `rows` bounds the rows of A; outputs and bias come filled in `p`.
template <typename S>
cudaError_t launch_grouped(Grouped p, const void* a, const float* a_scales, int a_scales_stride, const void* w,
                           int rows, int max_tiles, cudaStream_t stream) {
  const uint64_t a_sizes[2] = {uint64_t(p.k), uint64_t(rows)}, a_strides[1] = {uint64_t(p.k)};
  const uint32_t a_box[2] = {kBlockK, 64};
  const uint64_t scale_sizes[2] = {uint64_t(rows), uint64_t((p.k + S::kGroup - 1) / S::kGroup)};
  const uint64_t scale_strides[1] = {uint64_t(a_scales_stride) * 4};
  const uint32_t scale_box[2] = {kScaleBox, uint32_t(S::kGroups)};
  const uint64_t w_sizes[3] = {uint64_t(p.k), uint64_t(p.n), uint64_t(p.rows.num_experts)};
  const uint64_t w_strides[2] = {uint64_t(p.k), uint64_t(p.k) * uint64_t(p.n)};
  const uint32_t w_box[3] = {kBlockK, uint32_t(S::kColumns / S::kCluster), 1};
  cudaError_t error = encode_tensor_map(&p.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, a, a_sizes, a_strides, a_box,
                                        CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map(&p.a_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, a_scales, scale_sizes, scale_strides,
                            scale_box, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (error != cudaSuccess) return error;
  error = encode_tensor_map(&p.w, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, w, w_sizes, w_strides, w_box,
                            CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  static const cudaError_t allowed = cudaFuncSetAttribute(
      grouped<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t items = int64_t(max_tiles) * ((p.n + S::kColumns - 1) / S::kColumns);
  const int64_t wanted = items < processors ? items : processors;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = S::kCluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned((wanted + S::kCluster - 1) / S::kCluster * S::kCluster));
  config.blockDim = dim3(384);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = S::kCluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, grouped<S>, p);
}

}  // namespace rose::moe
