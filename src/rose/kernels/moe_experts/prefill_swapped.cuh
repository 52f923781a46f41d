// Grouped product of MXFP4 weights and E4M3 activations for Hopper, operands swapped: weights are operand A, expanded
// into registers by the warps that multiply them; tokens are operand B.
//
// A tile is 256 rows of an expert's matrix and up to 128 of its tokens. Roles of a persistent block: two warpgroups
// multiply 128 rows each, as two slabs of 64 (here and prefill_swapped_store.cuh); one warp of a third fills the ring of
// stages by TMA (prefill_swapped_fill.cuh).
//   pieces   a tile's tokens are two pieces of kN = 64, 48 or 32, chosen by the tile, so that it costs what it has.
//            Sums of one piece, both slabs, are live beside the float32 totals: a token's scale serves both slabs.
//   scales   one power of two for 128 rows and all of K (swapped_tables.py): totals are kept in its units, so that a
//            partial sum meets the token's scale only.
//   codes    thread (g, t) of a warp takes 32 codes of a row as they lie, block t of 128 columns. Word v of the four
//            becomes its bytes of product v of the four; activations are stored in that order:
//            byte 32v + 16u + 4t + b of a group of 128 is column 32t + 8v + 4u + b. The half group of a ragged K has
//            blocks of 16 codes and products v of two: byte 32v + 16u + 4t + b is column 16t + 8v + 4u + b.
//   rows     gate and up of a channel lie in one thread: fragment row 8h + g of warp w in slab s is channel
//            32s + 8w + g of the consumer's 64, h = 0 gate, h = 1 up. Down: row 64s + 16w + 8h + g.
// Expansion of a slab's next codes runs beside the products of the other slab.
// Why not slabs in turns, products always on their way: measured, 5 to 9 % slower
// (docs/experiments/prefill_experts.md). Why not three consumers of 64 rows: 192 rows are 96 channels, another group of
// the SwiGLU's scales than the 128 of every other format here, and 4/3 as many loads of scales and tokens for a product.
#pragma once

#include "prefill_permute.cuh"
#include "prefill_swapped_fill.cuh"
#include "prefill_swapped_store.cuh"
#include "warp.cuh"
#include "wgmma_fp8_registers.cuh"

namespace rose::moe::swapped {

// Eight codes to two words of E4M3, all signs turned: a positive code has bit 7, a negative one has not (`promote`
// subtracts). A selector with its top bit set gives the sign of 0x40, nothing, and else 0x40 itself.
__device__ __forceinline__ void expand_word(uint32_t codes, const uint32_t (&table)[2], uint32_t& first,
                                            uint32_t& second) {
  const uint32_t magnitudes = codes & 0x77777777u;
  first = permute_bytes(table[0], table[1], magnitudes) + 2 * permute_bytes(0x40404040u, 0x40404040u, codes);
  second = permute_bytes(table[0], table[1], magnitudes >> 16) + 2 * permute_bytes(0x40404040u, 0x40404040u, codes >> 16);
}

// A slab's operand of one stage: kSteps products of 32 along K.
template <typename P, int kSteps>
__device__ __forceinline__ void expand(uint32_t (&a)[4][4], int slab, uint32_t codes_at, uint32_t offsets,
                                       uint32_t table_at) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t table[2], codes[kSteps];
    load_shared(table, table_at + (offsets >> (16 * slab + 8 * h) & 255));
    load_shared(codes, codes_at + slab * P::kSlabPitch + h * P::kHalfPitch);
#pragma unroll
    for (int v = 0; v < kSteps; ++v) expand_word(codes[v], table, a[v][h], a[v][h + 2]);
  }
}

template <int kN, int kSteps>
__device__ __forceinline__ void multiply(float (&part)[kN / 2], const uint32_t (&a)[4][4], uint64_t x) {
#pragma unroll
  for (int v = 0; v < kSteps; ++v) wgmma_e4m3<kN>(part, a[v], advance(x, 32 * v), v > 0);
}

// `scales`: of this thread's first two tokens of the piece. Returns a word that has not arrived before all of them.
template <int kN>
__device__ __forceinline__ uint32_t promote(float (&low)[kN / 2], float (&high)[kN / 2], const float (&part)[2][kN / 2],
                                            uint32_t scales) {
  uint32_t read = 0;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const float scale0 = load_shared(scales + 32 * j), scale1 = load_shared(scales + 32 * j + 4);
    read = mix(read, __float_as_uint(scale0), __float_as_uint(scale1));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int d = 4 * j + 2 * h;
      low[d] -= part[0][d] * scale0;
      low[d + 1] -= part[0][d + 1] * scale1;
      high[d] -= part[1][d] * scale0;
      high[d + 1] -= part[1][d + 1] * scale1;
    }
  }
  return read;
}

// Where a thread finds its things in every stage.
struct Mine {
  uint32_t codes, offsets, scales;
};

// One stage, whose operands are in `a`; expands those of the next, which has four products.
template <typename P, int kN, int kSteps>
__device__ __forceinline__ void multiply_stage(float (&total)[2][2][kN / 2], uint32_t (&a)[2][4][4], const Shared& at,
                                               Cursor<P::kStages>& ring, const Mine& mine, bool has_next) {
  float part[2][kN / 2];
  const uint32_t stage = at.base + ring.stage * P::kStageBytes, empty = at.empty + 8 * ring.stage;
  const uint64_t x = descriptor_swizzle128(uniform(stage));
  const uint32_t scales = stage + P::kScalesAt + mine.scales, table = at.base + P::kTable;
  wgmma_fence();
  multiply<kN, kSteps>(part[0], a[0], x);
  multiply<kN, kSteps>(part[1], a[1], x);
  wgmma_commit();
  wgmma_wait<0>();
  settle(part[0]);
  settle(part[1]);
  promote<kN>(total[0][0], total[1][0], part, scales);
  wgmma_fence();
  multiply<kN, kSteps>(part[0], a[0], advance(x, kN * kBlockK));
  wgmma_commit();
  multiply<kN, kSteps>(part[1], a[1], advance(x, kN * kBlockK));
  wgmma_commit();
  ring.advance();
  const uint32_t next = at.base + ring.stage * P::kStageBytes;
  uint32_t offsets = 0;
  if (has_next) {
    mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
    offsets = __float_as_uint(load_shared(next + P::kOffsetsAt + mine.offsets));
    wgmma_wait<1>();
    settle(part[0]);
    expand<P, 4>(a[0], 0, next + P::kCodesAt + mine.codes, offsets, table);
  }
  wgmma_wait<0>();
  settle(part[0]);
  settle(part[1]);
  const uint32_t read = promote<kN>(total[0][1], total[1][1], part, scales + 4 * kN);
  __syncwarp();
  if (is_arriving()) mbarrier_arrive_after(empty, read);
  if (has_next) expand<P, 4>(a[1], 1, next + P::kCodesAt + mine.codes, offsets, table);
}

// Of 128 rows: weight row, in the order of the matrix, of fragment row 8h + g of a warp.
template <typename P>
__device__ __forceinline__ int row_of(int thread, int slab, int h) {
  const int warp = thread % 128 / 32, g = thread % 32 / 4;
  return P::kGateUp ? 2 * (32 * slab + 8 * warp + g) + h : 64 * slab + 16 * warp + 8 * h + g;
}

// 128 rows of a tile by one consumer, from the first stage to the last; totals are in units of the row scale.
template <typename P, int kN>
__device__ __forceinline__ void multiply_tile(float (&total)[2][2][kN / 2], const Problem& p, const Shared& at,
                                              Cursor<P::kStages>& ring, const Place& place) {
  const int thread = threadIdx.x, consumer = thread / 128, warp = thread % 128 / 32, g = thread % 32 / 4, t = thread % 4;
  const uint32_t stage = at.base + ring.stage * P::kStageBytes, table = at.base + P::kTable;
  const float row_scale = load_shared(stage + P::kRowScalesAt + 4 * consumer);
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(row_scale));  // of a power of two
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float bias = load_shared(stage + P::kBiasAt + 4 * (128 * consumer + row_of<P>(thread, s, h))) * inverse;
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        total[s][0][4 * j + 2 * h] = total[s][0][4 * j + 2 * h + 1] = bias;
        total[s][1][4 * j + 2 * h] = total[s][1][4 * j + 2 * h + 1] = bias;
      }
    }
  }
  const int code_row = (P::kGateUp ? 64 : 128) * consumer + (P::kGateUp ? 8 : 16) * warp + g;
  const Mine mine = {uint32_t(code_row * kRowCodes + 16 * t), uint32_t(4 * thread),
                     uint32_t(4 * ((place.row & 3) + 2 * t))};
  const int k_full = p.k / kBlockK;
  const uint32_t offsets = __float_as_uint(load_shared(stage + P::kOffsetsAt + mine.offsets));
  uint32_t a[2][4][4];
  if (p.k % kBlockK != 0) {
    const uint32_t codes = stage + P::kCodesAt + mine.codes - 8 * t;
    expand<P, 2>(a[0], 0, codes, offsets, table);
    expand<P, 2>(a[1], 1, codes, offsets, table);
    multiply_stage<P, kN, 2>(total, a, at, ring, mine, k_full > 0);
  } else {
    expand<P, 4>(a[0], 0, stage + P::kCodesAt + mine.codes, offsets, table);
    expand<P, 4>(a[1], 1, stage + P::kCodesAt + mine.codes, offsets, table);
  }
  for (int left = k_full; left > 0; --left) multiply_stage<P, kN, 4>(total, a, at, ring, mine, left > 1);
}

template <typename P, int kN>
__device__ __forceinline__ void consume_tile(const Problem& p, const Shared& at, Cursor<P::kStages>& ring,
                                             const Place& place, uint32_t staged_parity) {
  float total[2][2][kN / 2];
  const uint32_t stage = at.base + ring.stage * P::kStageBytes, kept = at.places + 32 * (threadIdx.x / 32);
  __syncwarp();  // every lane has read what was kept of the tile before
  store_place(kept, place);
  store_shared(kept + 16, __float_as_uint(load_shared(stage + P::kRowScalesAt + 4 * (threadIdx.x / 128))));
  multiply_tile<P, kN>(total, p, at, ring, place);
  const int thread = thread_again();
  const float row_scale = load_shared(kept + 16);
  if constexpr (P::kGateUp) {
    mbarrier_wait(at.staged_empty, staged_parity ^ 1);
    stage_hidden<P, kN>(total, p, row_scale, at.base + P::kStaged, thread);
  } else {
    store_rows<P, kN>(total, p, load_place(kept), row_scale, at.base + P::kStaged, thread);
  }
}

template <typename P>
__device__ __forceinline__ void consume(const Problem& p, int num_items, const Shared& at) {
  const int k_blocks = (p.k + kBlockK - 1) / kBlockK;
  const int consumer = uniform(threadIdx.x / 128);
  Cursor<P::kStages> ring;
  uint32_t staged_parity = 0;
  for (int round = 0; item_of_round(round) < num_items; ++round, staged_parity ^= 1) {
    mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
    Place place = load_place(at.base + ring.stage * P::kStageBytes + P::kPlaceAt);
    place = {uniform(place.expert), uniform(place.row), uniform(place.rows), uniform(place.column)};
    if (place.column + 128 * consumer >= p.n) {
      for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
        mbarrier_wait(at.full + 8 * ring.stage, ring.parity);
        __syncwarp();
        if (is_arriving()) mbarrier_arrive(at.empty + 8 * ring.stage);
      }
    } else if (place.rows > 96) {
      consume_tile<P, 64>(p, at, ring, place, staged_parity);
    } else if (place.rows > 64) {
      consume_tile<P, 48>(p, at, ring, place, staged_parity);
    } else {
      consume_tile<P, 32>(p, at, ring, place, staged_parity);
    }
    if constexpr (P::kGateUp) {
      // Both consumers stage; the second, which may end later, quantises.
      if (consumer == 0) {
        __syncwarp();
        if (is_arriving()) mbarrier_arrive(at.staged_full);
      } else {
        named_sync(1, 128);
        mbarrier_wait(at.staged_full, staged_parity);
        quantize_staged<P>(p, place, at.base + P::kStaged, threadIdx.x);
        __syncwarp();
        if (is_arriving()) mbarrier_arrive(at.staged_empty);
      }
    }
  }
}

// The tables of all shifts, by the first threads of a block: the E4M3 numbers of the eight magnitudes of a code.
__device__ __forceinline__ void store_tables(uint32_t at) {
  if (threadIdx.x < kTables) {
    const float unit = __uint_as_float(uint32_t(int(threadIdx.x) + kLowestShift + 127) << 23);
    const uint32_t entry = at + 8 * threadIdx.x;
    store_shared(entry, pack_e4m3(0.f, 0.5f * unit, unit, 1.5f * unit));
    store_shared(entry + 4, pack_e4m3(2.f * unit, 3.f * unit, 4.f * unit, 6.f * unit));
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1) product(const __grid_constant__ Problem p) {
  extern __shared__ uint8_t raw[];
  Shared at;
  at.base = uniform(int(shared_address(raw) + 1023) & ~1023);
  at.full = at.base + P::kBarriers;
  at.empty = at.full + 8 * P::kStages;
  at.staged_full = at.empty + 8 * P::kStages;
  at.staged_empty = at.staged_full + 8;
  at.places = at.base + P::kPlaces;
  if (threadIdx.x == 0) {
    for (int i = 0; i < P::kStages; ++i) {
      mbarrier_init(at.full + 8 * i, kWarpArrivals);
      mbarrier_init(at.empty + 8 * i, 8 * kWarpArrivals);  // eight multiplying warps
    }
    mbarrier_init(at.staged_full, 4 * kWarpArrivals);
    mbarrier_init(at.staged_empty, 4 * kWarpArrivals);
    mbarrier_init_fence();
  }
  store_tables(at.base + P::kTable);
  __syncthreads();
  const int runs = (p.n + kItemRows - 1) / kItemRows;
  const int num_items = uniform(__ldg(p.rows.tiles + p.rows.num_experts) * runs);
  if (threadIdx.x < 256) {
    registers_grow<240>();
    consume<P>(p, num_items, at);
  } else {
    registers_shrink<24>();
    if (threadIdx.x < 288) fill<P>(p, num_items, at);
  }
}

// Tensor maps that prefill_wide.cuh has too: tokens (`rows` bounds the rows of x), codes (`experts_rows` of all experts), offsets.
inline cudaError_t map_tokens(CUtensorMap* map, const void* x, int rows, int k) {
  const uint64_t sizes[2] = {uint64_t(k), uint64_t(rows)}, strides[1] = {uint64_t(k)};
  const uint32_t box[2] = {kBlockK, kBoxTokens};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, x, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Rows of all experts in a row: past the last row of an expert lie those of the next, whose sums are not stored.
template <typename P>
cudaError_t map_codes(CUtensorMap* map, const void* codes, uint64_t experts_rows, int k, int item_rows) {
  const uint64_t parities = P::kGateUp ? 2 : 1, row_bytes = k / 2;
  const uint64_t sizes[3] = {row_bytes, experts_rows / parities, parities};
  const uint64_t strides[2] = {row_bytes * parities, row_bytes};
  const uint32_t box[3] = {kRowCodes, uint32_t(item_rows / parities), uint32_t(parities)};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, codes, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

inline cudaError_t map_offsets(CUtensorMap* map, const void* offsets, uint64_t pieces, int item_rows) {
  const uint64_t sizes[2] = {uint64_t(item_rows), pieces}, strides[1] = {uint64_t(item_rows) * 4};
  const uint32_t box[2] = {uint32_t(item_rows), 1};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, offsets, sizes, strides, box,
                           CU_TENSOR_MAP_SWIZZLE_NONE);
}

// Tensor maps and launch. `rows` bounds the rows of x.
template <typename P>
cudaError_t launch(Problem p, const void* x, const float* x_scales, int x_scales_stride, const void* codes,
                   const void* offsets, int rows, int max_tiles, cudaStream_t stream) {
  const uint64_t runs = (p.n + kItemRows - 1) / kItemRows, k_blocks = (p.k + kBlockK - 1) / kBlockK;
  const uint64_t experts = p.rows.num_experts;
  cudaError_t error = map_tokens(&p.x, x, rows, p.k);
  if (error != cudaSuccess) return error;
  const uint64_t scale_sizes[2] = {uint64_t(rows), k_blocks}, scale_strides[1] = {uint64_t(x_scales_stride) * 4};
  const uint32_t scale_box[2] = {kScaleBox, 1};
  error = encode_tensor_map(&p.x_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, x_scales, scale_sizes, scale_strides,
                            scale_box, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (error != cudaSuccess) return error;
  error = map_codes<P>(&p.codes, codes, experts * p.n, p.k, kItemRows);
  if (error != cudaSuccess) return error;
  error = map_offsets(&p.offsets, offsets, experts * runs * k_blocks, kItemRows);
  if (error != cudaSuccess) return error;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(product<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  const int64_t items = int64_t(max_tiles) * int64_t(runs);
  product<P><<<persistent_blocks(items), P::kThreads, P::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace rose::moe::swapped
