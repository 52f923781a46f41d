// Grouped product of MXFP4 weights and E4M3 activations for Hopper, operands swapped as in prefill_swapped.cuh, but with
// one scale for all columns of a token: nothing happens to the sums of a tile until its end.
//
// A tile is 128 rows of an expert's matrix and up to 256 of its tokens. Two warpgroups multiply 64 rows each by all of
// the tile's tokens, 64 x 256 sums in 128 registers; one warp of a third fills the ring of stages by TMA.
//   widths   products are as wide as the tile has tokens, to the next 16 (WIDTHS): a short tile costs what it has.
//   operand  of the stage after next is expanded into a second set of registers while the products of this one run, so
//            that each warpgroup always has products on their way.
//   scales   a token's one scale and the rows' one power of two meet the sums at the end of the tile.
//   SwiGLU   leaves as E4M3 in units of `hidden_unit`, which are the scale of all tokens in down: it is at most
//            limit (limit + 1), 448 of them, so that no largest number is looked for.
//   sums     stay in the tensor core from the first product to the last: what its additions cut off is in
//            docs/experiments/prefill_experts_wide.md.
//   rows     gate and up of a channel lie in one thread: fragment row 8h + g of warp w of consumer c is channel
//            8 chunk + g of the tile's 64, chunk = 4 (w / 2) + 2c + w % 2, h = 0 gate, h = 1 up; so the bytes of a
//            consumer lie together in the order of columns that down reads. Down: row 64c + 16w + 8h + g.
// Codes, tables and the order of columns are those of prefill_swapped.cuh.
#pragma once

#include "prefill_swapped.cuh"
#include "prefill_wide_fill.cuh"
#include "prefill_wide_ptx.cuh"
#include "prefill_wide_store.cuh"

namespace rose::moe::wide {

using swapped::expand_word;
using swapped::map_codes;
using swapped::map_offsets;
using swapped::map_tokens;
using swapped::store_tables;

// Where a thread finds its things in every stage; `shift`: its two bytes in a word of offsets. Those lie as
// prefill_swapped.cuh reads them, a word for a thread of its warps w: the low half is of slab 0, the high one of slab 1,
// whose rows are 32s + 8w + g (channels of gate-up) or 64s + 16w + g.
struct Mine {
  uint32_t codes, offsets, shift;

  template <typename P>
  static __device__ __forceinline__ Mine of(int thread) {
    const int consumer = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
    const int slab = P::kGateUp ? warp / 2 : consumer, warp_of_slab = P::kGateUp ? 2 * consumer + warp % 2 : warp;
    return {uint32_t(code_row<P>(thread) * kRowCodes + 16 * (lane % 4)), uint32_t(4 * (32 * warp_of_slab + lane)),
            uint32_t(16 * slab)};
  }
};

// The operand of one stage: kSteps products of 32 along K. All signs are turned (expand_word).
template <typename P, int kSteps>
__device__ __forceinline__ void expand(uint32_t (&a)[4][4], uint32_t stage, const Mine& mine, uint32_t tables) {
  const uint32_t offsets = __float_as_uint(load_shared(stage + P::kOffsetsAt + mine.offsets)) >> mine.shift;
  // The half group of a ragged K has blocks of 16 codes: eight bytes a thread.
  const uint32_t codes_at = stage + P::kCodesAt + mine.codes - (kSteps == 2 ? 8 * (threadIdx.x % 4) : 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t table[2], codes[kSteps];
    load_shared(codes, codes_at + h * P::kHalfPitch);
    load_shared(table, tables + (offsets >> (8 * h) & 255));
#pragma unroll
    for (int v = 0; v < kSteps; ++v) expand_word(codes[v], table, a[v][h], a[v][h + 2]);
  }
}

// One stage, whose operand is in `now`. Its products run while those of the stage before end: then that stage's place is
// given back, and its registers, `next`, get the operand of the stage to come, which has four products.
template <typename P, int kN, int kSteps>
__device__ __forceinline__ void multiply_stage(float (&sums)[kN / 2], uint32_t (&now)[4][4], uint32_t (&next)[4][4],
                                               const Shared& at, Cursor<P::kStages>& ring, uint32_t& before,
                                               const Mine& mine, int accumulate, bool has_next) {
  const uint64_t x = descriptor_swizzle128(uniform(at.base + ring.stage * P::kStageBytes));
  wgmma_fence();
#pragma unroll
  for (int v = 0; v < kSteps; ++v) wgmma_e4m3<kN>(sums, now[v], advance(x, 32 * v), v > 0 || accumulate);
  wgmma_commit();
  const uint32_t done = before;
  before = at.empty + 8 * ring.stage;
  ring.advance();
  if (has_next) mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
  wgmma_wait<1>();
  __syncwarp();
  if (done != 0 && is_arriving()) mbarrier_arrive(done);
  // HAZARD: loaded before that wait, codes may be expanded before it, into registers that products still read.
  if (has_next) expand<P, 4>(next, at.base + ring.stage * P::kStageBytes, mine, at.base + P::kTable);
}

// 64 rows of a tile by one consumer, from the first stage, the half one, to the last. LIMIT: K = 128 k + 64; were a first
// half stage a choice, ptxas would serialise all products, because their sums begin in two places.
template <typename P, int kN>
__device__ __forceinline__ void multiply_tile(float (&sums)[kN / 2], const Problem& p, const Shared& at,
                                              Cursor<P::kStages>& ring) {
  const int thread = threadIdx.x, k_full = p.k / kBlockK;
  const Mine mine = Mine::of<P>(thread);
  uint32_t a[2][4][4], before = 0;
  expand<P, 2>(a[1], at.base + ring.stage * P::kStageBytes, mine, at.base + P::kTable);
  multiply_stage<P, kN, 2>(sums, a[1], a[0], at, ring, before, mine, 0, k_full > 0);
  for (int left = k_full; left > 0; left -= 2) {
    multiply_stage<P, kN, 4>(sums, a[0], a[1], at, ring, before, mine, 1, left > 1);
    if (left == 1) break;
    multiply_stage<P, kN, 4>(sums, a[1], a[0], at, ring, before, mine, 1, left > 2);
  }
  wgmma_wait<0>();
  settle(sums);
  __syncwarp();
  if (is_arriving()) mbarrier_arrive(before);
}

template <typename P, int kN>
__device__ __forceinline__ void consume_tile(const Problem& p, const Shared& at, Cursor<P::kStages>& ring,
                                             uint32_t end) {
  float total[kN / 2];
  multiply_tile<P, kN>(total, p, at, ring);
  // Read anew: neither place nor thread stays in registers over the products.
  const int thread = thread_again();
  const Place place = load_place(end + P::kPlaceAt);
  const uint32_t staged = at.base + P::kStaged + thread / 128 * P::kStagedBytes;
  if constexpr (P::kGateUp) store_hidden<P, kN>(total, p, place, end, staged, thread);
  else store_rows<P, kN>(total, p, place, end, staged, thread);
}

// The narrowest products that hold a tile's tokens.
template <typename P, int kN, int... kWider>
__device__ __forceinline__ void consume_by_width(const Problem& p, const Shared& at, Cursor<P::kStages>& ring, int tokens,
                                                 uint32_t end) {
  if constexpr (sizeof...(kWider) == 0) {
    consume_tile<P, kN>(p, at, ring, end);
  } else {
    if (tokens <= kN) consume_tile<P, kN>(p, at, ring, end);
    else consume_by_width<P, kWider...>(p, at, ring, tokens, end);
  }
}

template <typename P>
__device__ __forceinline__ void consume(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK;
  const int consumer = uniform(threadIdx.x / 128);
  Cursor<P::kStages> ring;
  Cursor<2> ends;
  for (int round = 0; item_of_round(round) < num_items; ++round, ends.advance()) {
    mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
    const uint32_t end = at.base + P::kEnds + ends.stage * P::kEndBytes;
    const Place place = load_place(end + P::kPlaceAt);
    if (uniform(place.column) + 64 * consumer >= p.n) {
      for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
        mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
        __syncwarp();
        if (is_arriving()) mbarrier_arrive(at.empty + 8 * ring.stage);
      }
    } else {
      consume_by_width<P, ROSE_WIDTHS>(p, at, ring, uniform(place.rows), end);
    }
    __syncwarp();
    if (is_arriving()) mbarrier_arrive(at.end_empty + 8 * ends.stage);
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1) product(const __grid_constant__ Problem p) {
  extern __shared__ uint8_t raw[];
  Shared at;
  at.base = uniform(int(shared_address(raw) + 1023) & ~1023);
  at.full = at.base + P::kBarriers;
  at.empty = at.full + 8 * P::kStages;
  at.end_empty = at.empty + 8 * P::kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < P::kStages; ++i) {
      mbarrier_init(at.full + 8 * i, kWarpArrivals);
      mbarrier_init(at.empty + 8 * i, 8 * kWarpArrivals);  // eight multiplying warps
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(at.end_empty + 8 * i, 8 * kWarpArrivals);
    mbarrier_init_fence();
  }
  store_tables(at.base + P::kTable);
  __syncthreads();
  const int runs = (p.n + kItemRows - 1) / kItemRows;
  const int num_items = uniform(__ldg(p.rows.tiles + p.rows.num_experts) * runs);
  if (threadIdx.x < 256) {
    registers_grow<232>();
    consume<P>(p, num_items, at);
  } else {
    registers_shrink<40>();
    if (threadIdx.x < 288) fill<P>(p, num_items, at);
  }
}

// Tensor maps and launch. `rows` bounds the rows of x.
template <typename P>
cudaError_t launch(Problem p, const void* x, const void* codes, const void* offsets, int rows, int max_tiles,
                   cudaStream_t stream) {
  if (p.k % kBlockK != kBlockK / 2) return cudaErrorInvalidValue;
  const uint64_t runs = (p.n + kItemRows - 1) / kItemRows, k_blocks = (p.k + kBlockK - 1) / kBlockK;
  const uint64_t experts = p.rows.num_experts;
  cudaError_t error = map_tokens(&p.x, x, rows, p.k);
  if (error != cudaSuccess) return error;
  error = map_codes<P>(&p.codes, codes, experts * p.n, p.k, kItemRows);
  if (error != cudaSuccess) return error;
  error = map_offsets(&p.offsets, offsets, 2 * experts * ((runs + 1) / 2) * k_blocks, kItemRows);
  if (error != cudaSuccess) return error;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(product<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  const int64_t items = int64_t(max_tiles) * int64_t(runs);
  product<P><<<persistent_blocks(items), P::kThreads, P::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace rose::moe::wide
