// Prefill attention for Hopper: bf16, head size 64, grouped queries, paged keys and values, sliding window, sinks.
//
// One block per multiprocessor walks a list of work items; an item is query rows of one sequence, all of one kv head
// (items.cuh). A producer warp copies the item's queries and its key and value tiles into shared memory with TMA; each
// consumer warpgroup owns a piece of 64 rows and keeps its scores, its probabilities (which are the A operand of the
// second product as they stand) and its output in registers. Tiles of keys are walked from the newest to the oldest,
// so that the causal mask is met first. The sink is where the running softmax starts: the maximum begins at its logit
// and the sum at one.
#include "items.cuh"
#include "kept.cuh"
#include "launch.cuh"
#include "mbarrier.cuh"
#include "profile.cuh"
#include "ptx.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

#include <atomic>
#include <type_traits>

#ifndef ROSE_VARIANTS
#error "define ROSE_VARIANTS: bit v is set where variant v is to be compiled"
#endif

namespace {

using namespace rose;
using namespace rose::attention_prefill;

constexpr int kHeadDim = 64;
constexpr int kRowBytes = kHeadDim * 2;           // one row of a tile is one 128-byte swizzle row
constexpr int kBoxBytes = kRows * kRowBytes;      // of one TMA box
constexpr int kMaxSequences = 2048;               // LIMIT: their starts and lengths are kept in shared memory
constexpr int kNoWindow = 1 << 30;
constexpr int kQuerySlots = 2;                    // items whose queries are in shared memory
constexpr int kItemSlots = 4;                     // items whose pieces are in shared memory
static_assert(kItemSlots == 2 * kQuerySlots, "a piece is read after its queries are released");
constexpr float kLowest = -1e30f;                 // finite, so that a row masked so far yields zeros and no NaN
constexpr float kLog2e = 1.4426950408889634f;

struct Parameters {
  const int* page_table;
  const int* query_starts;
  const int* lengths;
  const float* sinks;
  __nv_bfloat16* out;
  int page_stride;  // columns from one sequence's row of the page table to the next
  int num_sequences, num_heads, num_groups, heads_per_group, page_tokens;
  int window;
  int section_heads;  // heads walked together, so that their keys and values stay in L2
  float scale_log2, inverse_scale;
};

// Where dynamic shared memory begins, rounded up to 1024: known, so that addresses cost the loop nothing. The first
// KiB belongs to the driver; a profile keeps a few static words after it.
constexpr uint32_t kBase = kIsProfiled ? 2048 : 1024;

__device__ __forceinline__ void check_base(const uint8_t* raw) {
  if (((shared_address(raw) + 1023) & ~1023u) != kBase) __trap();
}

// Shared memory, by address. Barriers: queries full and empty [slot][warpgroup], tiles full and empty [stage].
template <class C>
struct Shared {
  static constexpr uint32_t base = kBase;
  static constexpr uint32_t kKeys = C::kQueryBytes;
  static constexpr uint32_t kValues = kKeys + C::kStages * C::kTileBytes;
  static constexpr uint32_t kBarriers = kValues + C::kStages * C::kTileBytes;
  static constexpr uint32_t kPieces = kBarriers + 8 * C::kNumBarriers;
  static constexpr uint32_t kTables = kPieces + kItemSlots * C::kWarpgroups * sizeof(Piece);

  __device__ uint32_t query(int slot, int wg) const { return base + (slot * C::kWarpgroups + wg) * kBoxBytes; }
  __device__ uint32_t key(int stage) const { return base + kKeys + stage * C::kTileBytes; }
  __device__ uint32_t value(int stage) const { return base + kValues + stage * C::kTileBytes; }
  __device__ uint32_t query_full(int slot, int wg) const {
    return base + kBarriers + 8 * (slot * C::kWarpgroups + wg);
  }
  __device__ uint32_t query_empty(int slot, int wg) const { return query_full(slot, wg) + 16 * C::kWarpgroups; }
  __device__ uint32_t tile_full(int stage) const { return base + kBarriers + 8 * (4 * C::kWarpgroups + stage); }
  __device__ uint32_t tile_empty(int stage) const { return tile_full(stage) + 8 * C::kStages; }
  __device__ Piece* piece(uint8_t* raw, int slot, int wg) const {
    return reinterpret_cast<Piece*>(raw + (base - shared_address(raw)) + kPieces) + slot * C::kWarpgroups + wg;
  }
  __device__ int* tables(uint8_t* raw) const {
    return reinterpret_cast<int*>(raw + (base - shared_address(raw)) + kTables);
  }
};

// A place in a ring of stages and the parity of its current use.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Fill the tables of sequences; warp 0 counts the tiles before each, which are count(new tokens, length).
template <class Count>
__device__ void count_tiles(const Parameters& p, const Tables& tables, Count count) {
  for (int s = threadIdx.x; s <= p.num_sequences; s += blockDim.x) {
    tables.starts[s] = p.query_starts[s];
    if (s < p.num_sequences) tables.lengths[s] = p.lengths[s];
  }
  if (threadIdx.x < 32) {
    int lane = threadIdx.x, before = 0;
    for (int base = 0; base < p.num_sequences; base += 32) {
      int s = base + lane, tiles = 0;
      if (s < p.num_sequences) {
        tiles = count(p.query_starts[s + 1] - p.query_starts[s], p.lengths[s]);
      }
      int sum = tiles;
      for (int step = 1; step < 32; step <<= 1) {
        int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      if (s < p.num_sequences) tables.tiles_before[s] = before + sum - tiles;
      before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) tables.tiles_before[p.num_sequences] = before;
  }
}

template <class C>
using ItemOf = std::conditional_t<C::kGrouped, GroupedItem, Item>;

template <class C>
__device__ __forceinline__ Cut cut_of(const Parameters& p) {
  return {C::kWarpgroups, C::kTile, p.window, p.section_heads, p.heads_per_group};
}

template <class C>
__device__ void count_items(const Parameters& p, const Tables& tables) {
  const Cut cut = cut_of<C>(p);
  count_tiles(p, tables, [&](int num_queries, int) {
    return C::kGrouped ? num_grouped_items(num_queries, cut) : num_tiles(num_queries, C::kWarpgroups * kRows);
  });
}

template <class C>
__device__ __forceinline__ int num_items(const Parameters& p, const Tables& tables) {
  return tables.tiles_before[p.num_sequences] * (C::kGrouped ? p.num_groups : p.num_heads);
}

// The producer warp hands item `index` (-1: no more work) to the warpgroups and starts the copy of its queries.
// Who may touch a piece: a lane writes it and arrives at query_full itself, which all readers wait for. It is written
// again four items later, after query_empty of the item two later: before its warp arrives there, lanes that read the
// piece met in the shuffles of walk_items.
template <class C>
__device__ __forceinline__ void hand_out(const ItemOf<C>& item, int index, const Cut& cut, const Shared<C>& shared,
                                         uint8_t* raw, const CUtensorMap* map_q, unsigned count,
                                         const Place<kQuerySlots>& slot) {
  const int lane = threadIdx.x & 31;
  if (lane < C::kWarpgroups) {
    mbarrier_wait(shared.query_empty(slot.stage, lane), slot.parity ^ 1);
    const uint32_t full = shared.query_full(slot.stage, lane);
    Piece& piece = *shared.piece(raw, count % kItemSlots, lane);
    if (index < 0) {
      piece.tile_high = -1;
      mbarrier_arrive(full);
    } else {
      piece = find_piece(item, cut, lane);
      mbarrier_arrive_expect(full, kBoxBytes);
      tma_load_3d(shared.query(slot.stage, lane), map_q, full, 0, piece.head, piece.first_row);
    }
  }
  __syncwarp();
}

// ---- consumers ------------------------------------------------------------------------------------------------

// What the rows of a thread (g and g + 8 of its warp) have come to.
struct Running {
  float maximum[2], sum[2];
  float factor[2];  // by which the output so far has to be multiplied, where the maxima were raised
};

// The largest raw score of each row in this thread's columns and before.
template <class C>
__device__ __forceinline__ void find_tops(const float (&s)[C::kScores], const float (&maximum)[2], float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float a = fmaxf(maximum[h], s[2 * h]), b = s[2 * h + 1];
#pragma unroll
    for (int j = 1; j < C::kTile / 8; ++j) {
      a = fmaxf(a, s[4 * j + 2 * h]);
      b = fmaxf(b, s[4 * j + 2 * h + 1]);
    }
    top[h] = fmaxf(a, b);
  }
}

__device__ __forceinline__ void share_tops(float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
  }
}

// Scores become probabilities relative to `maximum`; `sum` is that of this thread's columns.
template <class C>
__device__ __forceinline__ void exponentiate(float (&s)[C::kScores], const float (&maximum)[2], const Parameters& p,
                                             float (&sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float offset = -maximum[h] * p.scale_log2;
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int j = 0; j < C::kTile / 8; ++j) {
      float& low = s[4 * j + 2 * h];
      float& high = s[4 * j + 2 * h + 1];
      low = fmaf(low, p.scale_log2, offset);
      high = fmaf(high, p.scale_log2, offset);
      low = exp2_mufu(low);
      high = exp2_mufu(high);
      a += low;
      b += high;
    }
    sum[h] = a + b;
  }
}

// Mask what a row must not see. `last` is the row's position minus the column of this thread's first score.
template <class C>
__device__ __forceinline__ void mask_scores(float (&s)[C::kScores], const int (&last)[2], int window) {
#pragma unroll
  for (int j = 0; j < C::kTile / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * j + (e & 1), limit = last[e >> 1];
      if (column > limit || column <= limit - window) s[4 * j + e] = -INFINITY;
    }
  }
}

// `queries`: descriptor of the warpgroup's 64 rows.
template <class C>
__device__ __forceinline__ void issue_scores(float (&s)[C::kScores], uint64_t queries, uint32_t keys) {
  const uint64_t key = descriptor_swizzle128(keys);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    wgmma_bf16<C::kTile>(s, advance(queries, 32 * k), advance(key, 32 * k), k > 0);
  }
  wgmma_commit();
}

template <class C>
__device__ __forceinline__ void issue_output(float (&o)[32], const uint32_t (&packed)[C::kTile / 16][4],
                                             uint32_t values) {
  const uint64_t value = descriptor_swizzle128(values);
#pragma unroll
  for (int k = 0; k < C::kTile / 16; ++k) {
    wgmma_bf16_mn<kHeadDim>(o, packed[k], advance(value, 16 * kRowBytes * k), 1);
  }
  wgmma_commit();
}

// Zero the rows of a tile of values that lie past the end of the sequence: their memory was never written and may
// hold NaN, which a probability of zero does not remove. Several warpgroups may do it to one tile; all write zeros.
__device__ __forceinline__ void clear_values(uint32_t values, int first_row, int end_row, int wg) {
  for (int i = first_row * (kRowBytes / 16) + (threadIdx.x & 127); i < end_row * (kRowBytes / 16); i += 128) {
    store_zeros(values + 16 * i);
  }
  fence_proxy_async();
  named_sync(8 + wg, 128);
}

// Exchange words among four neighbouring threads: thread t gives word j of `w` to thread j and ends with
// word t of threads 0, 1, 2, 3.
__device__ __forceinline__ uint4 transpose_quad(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3, int t) {
  const bool odd = t & 1, upper = t & 2;
  uint32_t r0 = __shfl_xor_sync(~0u, odd ? w0 : w1, 1);
  uint32_t r1 = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
  uint32_t a0 = odd ? r0 : w0, a1 = odd ? w1 : r0;  // word t & 1 of threads (t & 2), (t & 2) + 1
  uint32_t b0 = odd ? r1 : w2, b1 = odd ? w3 : r1;  // word 2 + (t & 1) of the same
  uint32_t c0 = __shfl_xor_sync(~0u, upper ? a0 : b0, 2);
  uint32_t c1 = __shfl_xor_sync(~0u, upper ? a1 : b1, 2);
  return upper ? make_uint4(c0, c1, b0, b1) : make_uint4(a0, a1, c0, c1);
}

// Write a thread's two rows, `row` and row + 8, of those from `begin` to before `end`; `out` is at row 0.
__device__ __forceinline__ void store_output(__nv_bfloat16* out, int stride, const float (&o)[32],
                                             const float (&sum)[2], int row, int begin, int end) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float inverse = __fdividef(1.0f, total);
    uint32_t w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] = pack_bf16(o[4 * j + 2 * h] * inverse, o[4 * j + 2 * h + 1] * inverse);
    const uint4 left = transpose_quad(w[0], w[1], w[2], w[3], t);
    const uint4 right = transpose_quad(w[4], w[5], w[6], w[7], t);
    const int local = row + 8 * h;
    if (local >= begin && local < end) {
      __nv_bfloat16* to = out + local * stride + 8 * t;
      *reinterpret_cast<uint4*>(to) = left;
      *reinterpret_cast<uint4*>(to + 32) = right;
    }
  }
}

#include "streamed.cuh"
#include "window.cuh"

// Once per kernel and device: it may use as much shared memory as it ever needs.
template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, int bytes, std::atomic<uint64_t>& done) {
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || done.load(std::memory_order_relaxed) >> (device & 63) & 1) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) done.fetch_or(uint64_t(1) << (device & 63), std::memory_order_relaxed);
  return error;
}

struct Maps {
  CUtensorMap q, kv;
};

template <class C>
cudaError_t launch(const Maps& maps, const Parameters& p, int num_blocks, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const cudaError_t error = allow_shared(attention_prefill<C>, C::shared_bytes(kMaxSequences), done);
  if (error != cudaSuccess) return error;
  attention_prefill<C>
      <<<num_blocks, C::kThreads, C::shared_bytes(p.num_sequences), stream>>>(maps.q, maps.kv, p);
  return cudaGetLastError();
}

template <class Memory>
cudaError_t launch_window(const Maps& maps, const Parameters& p, int num_blocks, cudaStream_t stream) {
  if (p.window > kMaxWindow) return cudaErrorInvalidValue;
  static std::atomic<uint64_t> done{0};
  const cudaError_t error = allow_shared(attention_prefill_window<Memory>, Memory::bytes(kMaxSequences), done);
  if (error != cudaSuccess) return error;
  attention_prefill_window<Memory>
      <<<num_blocks, Memory::kThreads, Memory::bytes(p.num_sequences), stream>>>(maps.q, maps.kv, p);
  return cudaGetLastError();
}

constexpr int kWindowVariant = 40;  // window.cuh
constexpr int kEndVariants = kFirstVariant + sizeof(kVariants) / sizeof(Options);
static_assert(kEndVariants <= kWindowVariant, "numbers are taken twice");

constexpr bool is_compiled(int variant) { return uint64_t(ROSE_VARIANTS) >> variant & 1; }

// Variant kNumber or one after it.
template <int kNumber = kFirstVariant>
cudaError_t launch_variant(int variant, const Maps& maps, const Parameters& p, int num_blocks, cudaStream_t stream) {
  if constexpr (kNumber < kEndVariants) {
    if constexpr (is_compiled(kNumber)) {
      if (variant == kNumber) return launch<Config<kNumber>>(maps, p, num_blocks, stream);
    }
    return launch_variant<kNumber + 1>(variant, maps, p, num_blocks, stream);
  } else {
    if constexpr (is_compiled(kWindowVariant)) {
      if (variant == kWindowVariant) return launch_window<WindowShared>(maps, p, num_blocks, stream);
    }
    return cudaErrorInvalidValue;  // no such variant, or it was not compiled
  }
}

}  // namespace

// Shapes and meaning: contract.py. Packed by CALL in cuda_impl.py, with these fields in this order.
struct Call {
  const void *q, *kv, *page_table, *query_starts, *lengths, *sinks;
  void* out;
  cudaStream_t stream;
  int64_t q_stride;  // elements from one token to the next
  int64_t num_pages;
  int variant;      // a row of kVariants in streamed.cuh, or kWindowVariant
  int page_stride;  // elements from one sequence's row of the page table to the next
  int num_tokens, num_sequences, num_heads, num_groups, page_tokens;
  int window;  // 0: none
  int num_blocks;
  float scale;
};

static cudaError_t find_maps(const Call& c, Maps* maps) {
  static thread_local KeptMaps<CUtensorMap> kept;
  const uint64_t heads = c.num_heads, rows = uint64_t(c.num_pages) * 2 * c.num_groups * c.page_tokens;
  const uint64_t q_stride = uint64_t(c.q_stride) * 2;
  const int error = kept.find({c.q, heads, uint64_t(c.num_tokens), q_stride}, &maps->q, [&](CUtensorMap* map) {
    const uint64_t sizes[] = {kHeadDim, heads, uint64_t(c.num_tokens)}, strides[] = {kRowBytes, q_stride};
    const uint32_t box[] = {kHeadDim, 1, kRows};
    return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, c.q, sizes, strides, box,
                             CU_TENSOR_MAP_SWIZZLE_128B);
  });
  if (error != cudaSuccess) return cudaError_t(error);
  return cudaError_t(kept.find({c.kv, 0, rows, kRowBytes}, &maps->kv, [&](CUtensorMap* map) {
    const uint64_t sizes[] = {kHeadDim, rows}, strides[] = {kRowBytes};
    const uint32_t box[] = {kHeadDim, kRows};
    return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, c.kv, sizes, strides, box,
                             CU_TENSOR_MAP_SWIZZLE_128B);
  }));
}

extern "C" int launch_attention_prefill(const Call* call) {
  const Call& c = *call;
  if (c.num_tokens == 0) return cudaSuccess;
  if (c.num_sequences < 1 || c.num_sequences > kMaxSequences || c.page_tokens % kRows != 0) {
    return cudaErrorInvalidValue;
  }
  Maps maps;
  const cudaError_t error = find_maps(c, &maps);
  if (error != cudaSuccess) return error;

  // Without a window, walk only so many kv heads at a time as leave half of a 50 MB L2 to each of its halves.
  int section_groups = c.num_groups;
  const int64_t head_bytes = int64_t(c.page_stride) * c.page_tokens * 2 * kRowBytes;
  while (c.window == 0 && section_groups % 2 == 0 && section_groups * head_bytes > (int64_t(24) << 20)) {
    section_groups /= 2;
  }
  Parameters p;
  p.page_table = static_cast<const int*>(c.page_table);
  p.query_starts = static_cast<const int*>(c.query_starts);
  p.lengths = static_cast<const int*>(c.lengths);
  p.sinks = static_cast<const float*>(c.sinks);
  p.out = static_cast<__nv_bfloat16*>(c.out);
  p.page_stride = c.page_stride;
  p.num_sequences = c.num_sequences;
  p.num_heads = c.num_heads;
  p.num_groups = c.num_groups;
  p.heads_per_group = c.num_heads / c.num_groups;
  p.page_tokens = c.page_tokens;
  p.window = c.window > 0 ? c.window : kNoWindow;
  p.section_heads = section_groups * p.heads_per_group;
  p.scale_log2 = c.scale * kLog2e;
  p.inverse_scale = 1.0f / c.scale;
  return launch_variant(c.variant, maps, p, c.num_blocks, c.stream);
}
