// Draws a token per row: a cluster of blocks shares out the vocabulary, so that one launch does all.
//
// Without filters logits are read once. The score x - log(-log u) of an id can only pass the best so far where
// 1 - u <= exp(x - best), since -log u >= 1 - u: one exponential and 16 bits of the hash decide that for nearly all
// ids, and the few left are computed exactly. Results do not depend on which ids were left out.
//
// With filters each block keeps its share of logits / temperature in shared memory. The kept ids are a prefix of the
// ids in falling order of x (equal: lower id first), so that the last kept x says all: it is found by counting ids in
// 1024 bins, first by depth below the largest, then by ever narrower ranges of float keys until a bin is one key.
#pragma once

#include "draw_ptx.cuh"

namespace rose::draw {

constexpr int kBins = 1024;
constexpr int kDepthShift = 17, kDepthFirst = 121 * 64;  // bins of depth: 64 an octave from 2^-6 to 2^10
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kNoId = 0x7FFFFFFF;

struct Call {
  const void* logits;
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const long long* seed;
  const long long* position;
  long long* tokens;
  int vocab;
};

struct Best {
  float score;
  int id;
};

// What blocks tell each other: slot r is written by block r of the cluster. Two sets, used in turn.
template <int kCluster>
struct Slots {
  double mass[kCluster];
  float score[kCluster];
  int id[kCluster];
};

template <int kThreads, int kCluster>
struct Shared {
  uint32_t bins[kBins];  // of this block
  uint32_t sums[kBins];  // of the cluster
  Slots<kCluster> slots[2];
  double scan_low[kThreads / 32], scan_high[kThreads / 32];
  double found_low, found_high;
  uint32_t scan_count[kThreads / 32];
  uint32_t found_count;
  float warp_score[kThreads / 32];
  int warp_id[kThreads / 32];
  int certain, possible, cutoff;
};

// Ids of a block: [begin, end), begin a multiple of 4.
template <int kCluster>
__host__ __device__ constexpr int share_of(int vocab) {
  return (vocab + 4 * kCluster - 1) / (4 * kCluster) * 4;
}

__device__ __forceinline__ uint32_t mix(uint32_t h) {
  h ^= h >> 16, h *= 0x7FEB352Du;
  h ^= h >> 15, h *= 0x846CA68Bu;
  return h ^ (h >> 16);
}

// The hash of a row; an id is added and mixed once more.
__device__ __forceinline__ uint32_t row_hash(long long seed, long long position) {
  const uint64_t s = static_cast<uint64_t>(seed);
  const uint32_t h = mix(static_cast<uint32_t>(s) ^ 0x9E3779B9u);
  return mix(h ^ static_cast<uint32_t>(s >> 32) ^ 0x85EBCA6Bu * static_cast<uint32_t>(position));
}

// 1 + 1 - u from below, in steps of 2^-16: the last xor of `mix` leaves the upper bits alone.
__device__ __forceinline__ float one_plus_miss(uint32_t h) {
  h ^= h >> 16, h *= 0x7FEB352Du;
  h ^= h >> 15, h *= 0x846CA68Bu;
  return __uint_as_float(((~h >> 9) & 0x7FFF80u) | 0x3F800000u);
}

__device__ __forceinline__ float exact_score(float x, uint32_t hash) {
  const float u = fminf((__uint2float_rn(mix(hash)) + 0.5f) * 0x1p-32f, 0x1.fffffep-1f);
  return x + -logf(-logf(u));
}

// Keys rise with float values; both zeros are equal.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ int depth_bin(float top, float x) {
  const int bin = static_cast<int>(__float_as_uint(top - x) >> kDepthShift) - kDepthFirst;
  return min(max(bin, 0), kBins - 1);
}
// Depth at the upper edge of a bin; the last one has none.
__device__ __forceinline__ float depth_edge(int bin) {
  return __uint_as_float(static_cast<uint32_t>(kDepthFirst + bin) << kDepthShift);
}

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) < INFINITY; }

__device__ __forceinline__ void keep_better(Best& best, float score, int id) {
  if (score > best.score || (score == best.score && id < best.id)) best = {score, id};
}

template <class T>
__device__ __forceinline__ float4 load_four(const T* row, int id, int vocab, bool is_aligned) {
  if (is_aligned && id + 4 <= vocab) return load_vector(row + id);
  float4 v;
  float* at = &v.x;
  for (int e = 0; e < 4; ++e) at[e] = id + e < vocab ? to_float(row[id + e]) : -INFINITY;
  return v;
}

template <int kThreads, int kCluster>
struct Row {
  using Space = Shared<kThreads, kCluster>;
  Space& s;
  int rank, set = 0;

  // Reductions over the block; every thread gets the result.
  __device__ float block_max(float v) {
    const uint32_t key = warp_max(key_of(v));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) s.warp_score[threadIdx.x / 32] = value_of(key);
    __syncthreads();
    float most = -INFINITY;
    for (int w = 0; w < kThreads / 32; ++w) most = fmaxf(most, s.warp_score[w]);
    return most;
  }
  __device__ double block_sum(double v) {
    for (int d = 16; d > 0; d /= 2) v += shuffle_xor(v, d);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) s.scan_low[threadIdx.x / 32] = v;
    __syncthreads();
    double total = 0.0;
    for (int w = 0; w < kThreads / 32; ++w) total += s.scan_low[w];
    return total;
  }
  __device__ Best block_best(Best b) {
    for (int d = 16; d > 0; d /= 2) keep_better(b, shuffle_xor(b.score, d), shuffle_xor(b.id, d));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) s.warp_score[threadIdx.x / 32] = b.score, s.warp_id[threadIdx.x / 32] = b.id;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) keep_better(b, s.warp_score[w], s.warp_id[w]);
    return b;
  }

  // Tell all blocks of the cluster; what they told is in the set returned, once `cluster_sync` has passed.
  __device__ Slots<kCluster>& tell(float score, int id, double mass) {
    Slots<kCluster>& mine = s.slots[set];
    set ^= 1;
    if (threadIdx.x < kCluster) {
      Slots<kCluster>* there = remote(&mine, threadIdx.x);
      there->score[rank] = score, there->id[rank] = id, there->mass[rank] = mass;
    }
    return mine;
  }

  // The best score of this block's ids, among those of at least `least` that `is_kept`; c is log2(e) over temperature.
  template <bool kHasLeast, class Load, class Scaled, class IsKept>
  __device__ Best draw(Load load, Scaled scaled, IsKept is_kept, int begin, int end, uint32_t base, float c,
                       float least) {
    constexpr int kStride = 4 * kThreads, kBatch = 4;
    Best best = {-INFINITY, kNoId};
    auto look = [&](float x, int id) {
      const float v = scaled(x);
      if (is_kept(v, id)) keep_better(best, exact_score(v, base + id), id);
    };
    // One id of each thread gives a bound to begin with.
    const int mine = begin + 4 * threadIdx.x;
    if (mine < end) look(load(mine).x, mine);
    float bound = block_max(best.score);
    for (int first = mine; first - 4 * static_cast<int>(threadIdx.x & 31) < end; first += kBatch * kStride) {
      float4 x[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int id = first + b * kStride;
        x[b] = id < end ? load(id) : float4{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      }
      // The margin is far above the error of the products and exponentials below.
      const float start = -(bound - (1e-3f + fabsf(bound) * 4e-6f)) * kLog2e;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int id = first + b * kStride;
        const float at[4] = {x[b].x, x[b].y, x[b].z, x[b].w};
        bool may_win[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          may_win[e] = one_plus_miss(base + id + e) <= exp2_fast(fmaf(at[e], c, start)) + (1.0f + 0x1p-20f);
          if (kHasLeast) may_win[e] = may_win[e] && at[e] >= least;
        }
        if (may_win[0] || may_win[1] || may_win[2] || may_win[3]) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (may_win[e]) look(at[e], id + e);
          }
        }
      }
      bound = fmaxf(bound, value_of(warp_max(key_of(best.score))));
    }
    return best;
  }

  template <class Load>
  __device__ Best greedy(Load load, int begin, int end) {
    Best best = {-INFINITY, kNoId};
    constexpr int kStride = 4 * kThreads, kBatch = 4;
    for (int first = begin + 4 * threadIdx.x; first < end; first += kBatch * kStride) {
      float4 x[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int id = first + b * kStride;
        x[b] = id < end ? load(id) : float4{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int id = first + b * kStride;
        const float at[4] = {x[b].x, x[b].y, x[b].z, x[b].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (at[e] > best.score) best = {at[e], id + e};
        }
      }
    }
    return best;
  }

  // Bins of all blocks into `sums` of each; two meetings of the cluster.
  __device__ void add_bins() {
    cluster_sync();
    constexpr int kPart = kBins / kCluster;
    for (int i = threadIdx.x; i < kPart; i += kThreads) {
      const int bin = rank * kPart + i;
      uint32_t total = 0;
#pragma unroll
      for (int r = 0; r < kCluster; ++r) total += remote(s.bins, r)[bin];
#pragma unroll
      for (int r = 0; r < kCluster; ++r) remote(s.sums, r)[bin] = total;
    }
    cluster_sync();
  }

  // The smallest key of [a, b] for which `holds`, which stays true from there to b.
  template <class Holds>
  __device__ uint32_t first_key(uint32_t a, uint32_t b, Holds holds) {
    const uint32_t lane = threadIdx.x & 31;
    while (a < b) {
      const uint32_t step = (b - a) / 32 + 1, lead = step * (lane + 1) - 1;
      const uint32_t candidate = lead >= b - a ? b : a + lead;
      const int found = __ffs(ballot(holds(candidate))) - 1;
      const uint32_t before = shuffle(candidate, found > 0 ? found - 1 : 0);
      b = shuffle(candidate, found);
      if (found > 0) a = before + 1;
    }
    return b;
  }

  struct Edge {
    uint32_t key;    // of the last kept x
    uint32_t above;  // ids of larger keys
    uint32_t here;   // ids of this key
    uint32_t here_in_block;
    double mass;  // of larger keys
  };

  // Find the lowest key whose first holder is kept: fewer than `top_k` ids and less than `limit` mass lie before it.
  // Ids under `floor` do not exist. With `is_share`, `limit` comes as a share of the mass of all ids and becomes a mass.
  __device__ Edge descend(const float* x, int count, float top, uint32_t floor, uint32_t top_k, double& limit,
                          bool has_mass, bool is_share) {
    Edge edge = {key_of(top), 0, 0, 0, 0.0};
    const float floor_x = value_of(floor);
    uint32_t low = floor, high = edge.key, high_before = ~0u;
    __syncthreads();  // nobody reads the bins of a descent before
    for (int level = 0;; ++level) {
      const int shift = level == 0 ? 0 : max(0, 32 - kBinBits - __clz(high - low));
      for (int i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
      if (threadIdx.x == 0) s.certain = s.possible = -1;
      __syncthreads();
      // Count the window; add up what lies above it and below the window before.
      double mass = 0.0;
      const float high_x = value_of(high), low_x = value_of(low), before_x = value_of(high_before == ~0u ? high : high_before);
      for (int i = 4 * threadIdx.x; i < count; i += 4 * kThreads) {
        const float4 v = *reinterpret_cast<const float4*>(x + i);
        const float at[4] = {v.x, v.y, v.z, v.w};
        float part = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (i + e >= count) continue;
          if (level == 0) {
            if (at[e] >= floor_x) {
              count_one(&s.bins[depth_bin(top, at[e])]);
              if (is_share) part += exp_fast(at[e] - top);
            }
          } else if (at[e] <= high_x) {
            if (at[e] >= low_x) count_one(&s.bins[(high - key_of(at[e])) >> shift]);
          } else if (has_mass && (at[e] <= before_x || high_before == ~0u)) {
            part += exp_fast(at[e] - top);
          }
        }
        mass += part;
      }
      if (has_mass || is_share) mass = block_sum(mass);
      Slots<kCluster>& told = tell(0.0f, 0, mass);
      add_bins();
      if (has_mass || is_share) {
        double total = 0.0;
        for (int r = 0; r < kCluster; ++r) total += told.mass[r];
        if (level == 0 && is_share) limit *= total;
        if (level > 0) edge.mass += total;
      }
      // Running counts and bounds of mass, at the start of each thread's bins.
      constexpr int kOwn = kBins / kThreads;
      const bool is_last = level > 0 && shift == 0;
      const int own = threadIdx.x * kOwn;
      auto bound = [&](int bin, uint32_t n, double& least, double& most) {
        least = most = 0.0;
        if (n == 0 || !has_mass) return;
        float upper, lower;
        if (level == 0) {
          upper = bin == 0 ? 0.0f : -depth_edge(bin);
          lower = bin == kBins - 1 ? -INFINITY : -depth_edge(bin + 1);
        } else {
          const uint32_t first = high - (static_cast<uint32_t>(bin) << shift), width = (1u << shift) - 1;
          upper = value_of(first) - top;
          lower = value_of(first - min(width, first - low)) - top;
        }
        if (level == 0) {
          // 1e-5 is far above the rounding of these exponentials.
          most = n * static_cast<double>(exp_fast(upper)) * (1.0 + 1e-5);
          least = n * static_cast<double>(exp_fast(lower)) * (1.0 - 1e-5);
        } else {
          most = n * exp(static_cast<double>(upper));
          least = is_last ? most : n * exp(static_cast<double>(lower));
        }
      };
      uint32_t n[kOwn], count_own = 0;
      double least[kOwn], most[kOwn], low_own = 0.0, high_own = 0.0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        n[i] = s.sums[own + i];
        bound(own + i, n[i], least[i], most[i]);
        count_own += n[i], low_own += least[i], high_own += most[i];
      }
      uint32_t count_at = count_own;
      double low_at = low_own, high_at = high_own;
      const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
      for (int d = 1; d < 32; d *= 2) {
        const uint32_t a = shuffle_up(count_at, d);
        if (lane >= d) count_at += a;
        if (has_mass) {
          const double b = shuffle_up(low_at, d), e = shuffle_up(high_at, d);
          if (lane >= d) low_at += b, high_at += e;
        }
      }
      __syncthreads();
      if (lane == 31) s.scan_count[warp] = count_at, s.scan_low[warp] = low_at, s.scan_high[warp] = high_at;
      __syncthreads();
      count_at = shuffle_up(count_at, 1);
      low_at = shuffle_up(low_at, 1), high_at = shuffle_up(high_at, 1);
      if (lane == 0) count_at = 0, low_at = high_at = 0.0;
      for (int w = 0; w < warp; ++w) count_at += s.scan_count[w], low_at += s.scan_low[w], high_at += s.scan_high[w];
      uint32_t count_here = edge.above + count_at;
      double low_here = edge.mass + low_at, high_here = edge.mass + high_at;
      int certain = -1, possible = -1;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // The first holder in the window is kept, whatever rounding says.
        const bool is_first = count_here == edge.above;
        if (n[i] > 0 && (is_first || count_here < top_k)) {
          if (is_first || !has_mass || low_here < limit) possible = own + i;
          if (is_first || !has_mass || high_here < limit) certain = own + i;
        }
        count_here += n[i], low_here += least[i], high_here += most[i];
      }
      if (possible >= 0) atomicMax(&s.possible, possible);
      if (certain >= 0) atomicMax(&s.certain, certain);
      __syncthreads();
      // Four levels nearly always suffice; bounds that stay apart after eight no longer matter.
      const int deepest = max(s.possible, 0), sure = is_last || level >= 8 ? deepest : max(s.certain, 0);
      if (own <= sure && sure < own + kOwn) {
        uint32_t before = edge.above + count_at;
        double mass_before = edge.mass + high_at;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (own + i < sure) before += n[i], mass_before += most[i];
        }
        s.found_count = before, s.found_high = mass_before;
      }
      __syncthreads();
      edge.above = s.found_count;
      if (is_last) {
        edge.mass = s.found_high;
        edge.key = high - sure;
        edge.here = s.sums[sure], edge.here_in_block = s.bins[sure];
        return edge;
      }
      const uint32_t high_old = high;
      if (level == 0) {
        const uint32_t topmost = high;
        if (sure > 0) high = first_key(low, topmost, [&](uint32_t k) { return depth_bin(top, value_of(k)) < sure; }) - 1;
        if (deepest < kBins - 1) {
          low = first_key(low, topmost, [&](uint32_t k) { return depth_bin(top, value_of(k)) <= deepest; });
        }
      } else {
        const uint32_t bottom = low;
        const uint32_t end = static_cast<uint32_t>(deepest + 1) << shift;
        if (end - 1 < high_old - bottom) low = high_old - (end - 1);
        high = high_old - (static_cast<uint32_t>(sure) << shift);
        high_before = high_old;
      }
      // Everything above the new window and not yet added is added in the next pass.
      if (level == 0) high_before = ~0u;
      __syncthreads();
    }
  }

  // The id of the `wanted`-th (from 1) holder of `value` in this block; all threads get it.
  __device__ int holder(const float* x, int count, float value, int begin, uint32_t wanted) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = kThreads / 32;
    const int share = (count + 32 * warps - 1) / (32 * warps) * 32, first = warp * share, last = min(first + share, count);
    uint32_t mine = 0;
    for (int i = first; i < last; i += 32) mine += __popc(ballot(i + lane < last && x[min(i + lane, count - 1)] == value));
    __syncthreads();
    if (lane == 0) s.scan_count[warp] = mine;
    __syncthreads();
    uint32_t before = 0;
    for (int w = 0; w < warp; ++w) before += s.scan_count[w];
    for (int i = first; i < last; i += 32) {
      const bool is_holder = i + lane < last && x[min(i + lane, count - 1)] == value;
      const unsigned mask = ballot(is_holder);
      if (is_holder && before + __popc(mask & ((1u << lane) - 1)) + 1 == wanted) s.cutoff = begin + i + lane;
      before += __popc(mask);
    }
    __syncthreads();
    const int found = s.cutoff;
    __syncthreads();  // all have it: it may be written for all blocks
    return found;
  }

  static constexpr int kBinBits = 10;
};

// One row, by all threads of a cluster. `values`: room for a block's share where rows may filter.
template <class T, bool kMayFilter, int kThreads, int kCluster>
__device__ __forceinline__ void draw_row(const Call& c, Shared<kThreads, kCluster>& s, float* values, int row, int rank) {
  Row<kThreads, kCluster> r{s, rank};
  const T* logits = static_cast<const T*>(c.logits) + static_cast<size_t>(row) * c.vocab;
  const float temperature = c.temperature[row];
  const uint32_t base = row_hash(c.seed[row], c.position[row]);
  const int share = share_of<kCluster>(c.vocab), begin = min(rank * share, c.vocab), end = min(begin + share, c.vocab);
  const bool is_aligned = reinterpret_cast<uintptr_t>(logits) % (4 * sizeof(T)) == 0;
  auto load = [&](int id) { return load_four(logits, id, c.vocab, is_aligned); };
  int top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
  if (kMayFilter) top_k = max(c.top_k[row], 0), top_p = c.top_p[row], min_p = c.min_p[row];
  cluster_sync();  // all blocks run: their shared memory may be written

  Best best;
  if (temperature == 0.0f) {
    best = r.greedy(load, begin, end);
  } else if (!kMayFilter || (top_k == 0 && top_p >= 1.0f && min_p <= 0.0f)) {
    auto scaled = [&](float x) { return divide(x, temperature); };
    auto all = [](float, int) { return true; };
    best = r.template draw<false>(load, scaled, all, begin, end, base, divide(kLog2e, temperature), 0.0f);
  } else {
    const int count = end - begin;
    float largest = -INFINITY;
    for (int i = 4 * threadIdx.x; i < count; i += 4 * kThreads) {
      float4 v = load(begin + i);
      if (temperature != 1.0f) {
        v.x = divide(v.x, temperature), v.y = divide(v.y, temperature);
        v.z = divide(v.z, temperature), v.w = divide(v.w, temperature);
      }
      // NaN counts as -inf, as where nothing is filtered, since it passes no comparison there.
      v.x = fmaxf(v.x, -INFINITY), v.y = fmaxf(v.y, -INFINITY), v.z = fmaxf(v.z, -INFINITY), v.w = fmaxf(v.w, -INFINITY);
      *reinterpret_cast<float4*>(values + i) = v;
      largest = fmaxf(fmaxf(largest, fmaxf(v.x, v.y)), fmaxf(v.z, v.w));
    }
    largest = r.block_max(largest);
    const Slots<kCluster>& told = r.tell(largest, 0, 0.0);
    cluster_sync();
    float top = told.score[0];
    for (int i = 1; i < kCluster; ++i) top = fmaxf(top, told.score[i]);

    float last_x = -INFINITY;
    int cutoff = kNoId;
    if (is_finite(top) && (top_k > 0 || top_p < 1.0f)) {
      const uint32_t most = top_k > 0 ? top_k : ~0u;
      const bool has_mass = top_p < 1.0f;
      double limit = top_p;
      uint32_t floor = key_of(-INFINITY);
      typename Row<kThreads, kCluster>::Edge edge;
      if (top_k > 0) {
        // No limit yet, but masses are wanted where top_p is a share of them.
        double endless = INFINITY;
        edge = r.descend(values, count, top, floor, most, endless, has_mass, false);
        if (has_mass) {
          const double p = exp(static_cast<double>(value_of(edge.key) - top));
          limit *= edge.mass + min(most - edge.above, edge.here) * p;
          floor = edge.key;
        }
      }
      if (has_mass) edge = r.descend(values, count, top, floor, most, limit, true, top_k == 0);
      last_x = value_of(edge.key);
      uint32_t kept = min(edge.here, most - edge.above);
      if (has_mass) {
        const double by_mass = ceil((limit - edge.mass) / exp(static_cast<double>(last_x - top)));
        if (by_mass < kept) kept = by_mass < 1.0 ? 1u : static_cast<uint32_t>(by_mass);
      }
      if (kept < edge.here) {
        const Slots<kCluster>& holders = r.tell(0.0f, static_cast<int>(edge.here_in_block), 0.0);
        cluster_sync();
        uint32_t before = 0;
        for (int i = 0; i < rank; ++i) before += holders.id[i];
        if (before < kept && kept <= before + edge.here_in_block) {
          const int found = r.holder(values, count, last_x, begin, kept - before);
          if (threadIdx.x < kCluster) remote(&s.cutoff, threadIdx.x)[0] = found;
        }
        cluster_sync();
        cutoff = s.cutoff;
      }
    }
    float least = last_x;
    if (min_p > 0.0f) least = fmaxf(least, top + logf(min_p) - 1e-3f);
    auto from_shared = [&](int id) { return *reinterpret_cast<const float4*>(values + id - begin); };
    auto same = [](float x) { return x; };
    auto is_kept = [&](float x, int id) {
      if (x < last_x || (x == last_x && id > cutoff)) return false;
      return min_p <= 0.0f || exp(static_cast<double>(x - top)) >= static_cast<double>(min_p);
    };
    __syncthreads();
    best = r.template draw<true>(from_shared, same, is_kept, begin, end, base, kLog2e, least);
  }
  best = r.block_best(best);
  const Slots<kCluster>& found = r.tell(best.score, best.id, 0.0);
  cluster_sync();
  if (rank == 0 && threadIdx.x == 0) {
    best = {-INFINITY, kNoId};
    for (int i = 0; i < kCluster; ++i) keep_better(best, found.score[i], found.id[i]);
    // Noise is finite, so the best score says whether the largest logit is.
    c.tokens[row] = is_finite(best.score) ? best.id : -1;
  }
}

}  // namespace rose::draw
