// Both matrices of the decode experts in one launch: weights of down stream in while the last rows of gate_up are
// multiplied, where two launches empty and fill the chip in between.
//
// As in decode_stream.cuh, of which it is made: units of 16 rows, dealt out to resident blocks. A block's ring first
// holds its share of gate_up, then its share of down, without a pause. A block that has written its part of an
// expert's SwiGLU adds the number of its units to a counter in memory; down's activations are read once the counter
// is full. The sum over the chosen experts is a kernel of its own, which also clears the counters.
#pragma once

#include "../../src/rose/kernels/moe_experts/decode_stream.cuh"
#include "whole_ptx.cuh"

namespace rose::moe_decode {

struct WholeCall {
  Call gate_up, down;  // the same pairs, columns and stages; down reads what gate_up writes
  int* written;        // [hits] units of gate_up whose SwiGLU is in memory; zeros between calls
  int64_t* marks;      // [blocks, kMarks] nanoseconds, with ROSE_TIMELINE alone
};

// What a timeline build notes, in this order.
enum Mark { kBegun, kRouterDone, kFirstWeights, kGateUpMultiplied, kGateUpWritten, kActivationsThere, kDownMultiplied, kDownWritten, kMarks };

__device__ __forceinline__ void mark(const WholeCall& w, Mark which) {
#ifdef ROSE_TIMELINE
  w.marks[blockIdx.x * kMarks + which] = nanoseconds();
#endif
}

struct Share {
  int begin, end;
  __device__ static Share of(int total) {
    return {static_cast<int>(static_cast<int64_t>(total) * blockIdx.x / gridDim.x),
            static_cast<int>(static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x)};
  }
};

// Grid: any number of blocks that are resident at once; they wait for each other. kColumns: 0 or the columns.
template <int kWarps, int kTiles, int kColumns>
__global__ void __launch_bounds__(kWarps * 32 + 32, kWarps == 8 ? 2 : 1) whole_kernel(const WholeCall w) {
  constexpr int kThreads = kWarps * 32 + 32;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int stages = w.gate_up.stages;
  const Layout l = Layout::make<false, kWarps, kTiles>(w.gate_up);
  int4* hits = reinterpret_cast<int4*>(shared + l.hits);
  uint16_t* order = reinterpret_cast<uint16_t*>(shared + l.order);
  int* counts = reinterpret_cast<int*>(shared + l.counts);
  const uint32_t full = shared_address(shared + l.barriers);
  const uint32_t part_full = full + 8 * stages, part_empty = part_full + 8 * kParts;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

  if (threadIdx.x == 0) {
    mark(w, kBegun);
    for (int s = 0; s < stages; ++s) mbarrier_init(full + 8 * s, 1);
    for (int s = 0; s < kParts; ++s) {
      mbarrier_init(part_full + 8 * s, kWarps * kWarpArrivals);
      mbarrier_init(part_empty + 8 * s, kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  wait_for_kernel_before();
  let_next_kernel_start();
  if (threadIdx.x == 0) mark(w, kRouterDone);
  list_hits<8 * kTiles, kThreads>(w.gate_up, hits, counts, order, counts + w.gate_up.experts);
  const int num_hits = counts[w.gate_up.experts];
  const int units_up = w.gate_up.rows / kUnitRows, units_down = w.down.rows / kUnitRows;
  const Share up = Share::of(num_hits * units_up), down = Share::of(num_hits * units_down);
  const int num_up = up.end - up.begin, num_items = num_up + down.end - down.begin;

  // Item k of this block lies in stage k % stages and its parts in buffer k % kParts, through both matrices.
  int k = 0, stage = 0;
  if (warp == kWarps) {
    auto issue = [&](int item, int to) {
      const bool is_up = item < num_up;
      const Call& c = is_up ? w.gate_up : w.down;
      const int units = is_up ? units_up : units_down, number = is_up ? up.begin + item : down.begin + item - num_up;
      const int hit = number / units, unit = number - hit * units;
      const size_t row = static_cast<size_t>(hits[hit].x) * c.rows + unit * kUnitRows;
      const uint32_t target = shared_address(shared + to * l.stage_bytes), barrier = full + 8 * to;
      mbarrier_arrive_expect(barrier, l.stage_bytes);
      bulk_load(target, c.codes + row * (l.code_bytes / kUnitRows), l.code_bytes, barrier);
      bulk_load(target + l.code_bytes, static_cast<const uint8_t*>(c.scales) + row * (c.columns / 32), l.scale_bytes,
                barrier);
    };
    if (lane == 0) {
      for (int s = 0; s < stages && s < num_items; ++s) issue(s, s);
    }
    auto finish = [&](auto is_up, const Call& c, const Share& share, int units) {
      constexpr bool kGateUp = decltype(is_up)::value;
      int hit = share.begin / units, unit = share.begin - hit * units, num_written = 0;
      for (int item = share.begin; item < share.end; ++item, ++k) {
        const int4 h = hits[hit];
        const uint32_t bias = *reinterpret_cast<const uint32_t*>(c.bias + static_cast<size_t>(h.x) * c.rows +
                                                                 unit * kUnitRows + 2 * (lane >> 2));
        const int buffer = k % kParts;
        mbarrier_wait(part_full + 8 * buffer, (k / kParts) & 1);
        if (lane == 0 && k + stages < num_items) issue(k + stages, stage);
        __syncwarp();
        const float4* parts = reinterpret_cast<const float4*>(shared + l.parts) + buffer * kWarps * kTiles * 32;
        finish_unit<kWarps, kTiles, kGateUp>(c, h, unit, parts, order, __uint_as_float(bias << 16),
                                             __uint_as_float(bias & 0xFFFF0000u));
        __syncwarp();
        mbarrier_arrive_warp(part_empty + 8 * buffer, lane);
        ++num_written;
        if (++unit == units || item + 1 == share.end) {
          // Once per expert and block, not per unit: the release waits for this warp's stores.
          if (kGateUp && lane == 0) add_release(w.written + hit, num_written);
          num_written = 0;
        }
        if (unit == units) unit = 0, ++hit;
        if (++stage == stages) stage = 0;
      }
    };
    finish(std::true_type{}, w.gate_up, up, units_up);
    if (lane == 0) mark(w, kGateUpWritten);
    finish(std::false_type{}, w.down, down, units_down);
    if (lane == 0) mark(w, kDownWritten);
  } else {
    uint32_t stage_parity = 0;
    bool has_loaded = false;
    auto multiply = [&](auto is_up, const Call& c, const Share& share, int units) {
      constexpr bool kGateUp = decltype(is_up)::value;
      int hit = share.begin / units, unit = share.begin - hit * units, loaded = -1;
      for (int item = share.begin; item < share.end; ++item, ++k) {
        const int4 h = hits[hit];
        if (hit != loaded) {
          if (!kGateUp && threadIdx.x == 0) {
            while (load_acquire(w.written + hit) != units_up) {
            }
            if (loaded < 0) mark(w, kActivationsThere);
          }
          if (!kGateUp || has_loaded) named_sync(1, kWarps * 32);
          load_tokens<false, kGateUp, kWarps * 32>(c, h, order, shared + l.x, l.x_stride);
          named_sync(1, kWarps * 32);
          loaded = hit, has_loaded = true;
        }
        mbarrier_wait(full + 8 * stage, stage_parity);
        if (kGateUp && threadIdx.x == 0 && k == 0) mark(w, kFirstWeights);
        const uint8_t* source = shared + stage * l.stage_bytes;
        const int buffer = k % kParts;
        float4* parts = reinterpret_cast<float4*>(shared + l.parts) + (buffer * kWarps + warp) * kTiles * 32 + lane;
        auto run = [&](auto tiles) {
          constexpr int kT = decltype(tiles)::value;
          float acc[kT][2][4] = {};
          multiply_unit<false, kWarps, kT, kColumns>(acc, c, source, l.code_bytes, nullptr, shared + l.x, l.x_stride, h.z);
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
        if (++stage == stages) stage = 0, stage_parity ^= 1;
        if (++unit == units) unit = 0, ++hit;
      }
    };
    multiply(std::true_type{}, w.gate_up, up, units_up);
    if (threadIdx.x == 0) mark(w, kGateUpMultiplied);
    multiply(std::false_type{}, w.down, down, units_down);
    if (threadIdx.x == 0) mark(w, kDownMultiplied);
  }
}

struct Sum {
  const float* y;                // [tokens * chosen, columns]
  const int* ids;                // [tokens * chosen]
  const __nv_bfloat16* weights;  // [tokens * chosen]
  __nv_bfloat16* out;            // [tokens, columns]
  int* written;                  // [num_written]
  int chosen, columns, num_written;
};

constexpr int kSumThreads = 256;

// out[token] = sum over k of weight * y[token, k], k = 0 first. Grid: tokens * ceil(columns / kSumThreads).
__global__ void __launch_bounds__(kSumThreads) sum_kernel(const Sum s) {
  wait_for_kernel_before();
  let_next_kernel_start();
  const int parts = (s.columns + kSumThreads - 1) / kSumThreads;
  const int token = blockIdx.x / parts, column = blockIdx.x % parts * kSumThreads + threadIdx.x;
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < s.num_written; i += kSumThreads) s.written[i] = 0;
  }
  if (column >= s.columns) return;
  float sum = 0;
  for (int i = 0; i < s.chosen; ++i) {
    const int pair = token * s.chosen + i;
    if (s.ids[pair] < 0) continue;
    sum += __bfloat162float(s.weights[pair]) * s.y[static_cast<size_t>(pair) * s.columns + column];
  }
  s.out[static_cast<size_t>(token) * s.columns + column] = __float2bfloat16(sum);
}

// Hits that a call may have, as Layout counts them: the length of `written`.
__host__ __device__ inline int most_hits(const Call& c, int width) {
  return (c.pairs < c.experts ? c.pairs : c.experts) + c.pairs / width + 1;
}

}  // namespace rose::moe_decode
