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
#include "ring.cuh"
#include "tma.cuh"
#include "warp.cuh"
#include "wgmma.cuh"

#include <atomic>

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
  int section_groups;  // as in Cut
  float scale_log2, inverse_scale;
};

// Where dynamic shared memory begins, rounded up to 1024: known, so that addresses cost the loop nothing. The first
// KiB belongs to the driver; a profile keeps a few static words after it.
constexpr uint32_t kBase = kIsProfiled ? 2048 : 1024;

__device__ __forceinline__ void check_base(const uint8_t* raw) {
  if (((shared_address(raw) + 1023) & ~1023u) != kBase) __trap();
}

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

// Exchange words among four neighbouring threads: thread t gives word j to thread j and ends with word t of threads
// 0, 1, 2, 3. What transpose_quad of warp.cuh does; this way ptxas makes the code that was measured.
__device__ __forceinline__ uint4 gather_words(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3, int t) {
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
    const uint4 left = gather_words(w[0], w[1], w[2], w[3], t);
    const uint4 right = gather_words(w[4], w[5], w[6], w[7], t);
    const int local = row + 8 * h;
    if (local >= begin && local < end) {
      __nv_bfloat16* to = out + local * stride + 8 * t;
      *reinterpret_cast<uint4*>(to) = left;
      *reinterpret_cast<uint4*>(to + 32) = right;
    }
  }
}

#include "full.cuh"
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

template <class Memory, class Kernel>
cudaError_t launch(Kernel* kernel, const Maps& maps, const Parameters& p, int num_blocks, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const cudaError_t error = allow_shared(kernel, Memory::bytes(kMaxSequences), done);
  if (error != cudaSuccess) return error;
  kernel<<<num_blocks, Memory::kThreads, Memory::bytes(p.num_sequences), stream>>>(maps.q, maps.kv, p);
  return cudaGetLastError();
}

constexpr int kFullVariant = 38, kWindowVariant = 40;  // VARIANTS in cuda_impl.py

template <uint64_t kCompiled>
cudaError_t launch_variant(int variant, const Maps& maps, const Parameters& p, int num_blocks, cudaStream_t stream) {
  if constexpr (kCompiled >> kFullVariant & 1) {
    if (variant == kFullVariant) {
      return launch<FullShared>(attention_prefill_full<void>, maps, p, num_blocks, stream);
    }
  }
  if constexpr (kCompiled >> kWindowVariant & 1) {
    if (variant == kWindowVariant && p.window <= kMaxWindow) {
      return launch<WindowShared>(attention_prefill_window<void>, maps, p, num_blocks, stream);
    }
  }
  return cudaErrorInvalidValue;  // no such variant, or it was not compiled
}

}  // namespace

// Shapes and meaning: contract.py. Packed by CALL in cuda_impl.py, with these fields in this order.
struct Call {
  const void *q, *kv, *page_table, *query_starts, *lengths, *sinks;
  void* out;
  cudaStream_t stream;
  int64_t q_stride;  // elements from one token to the next
  int64_t num_pages;
  int variant;      // a row of kFullVariant or kWindowVariant
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
  p.section_groups = section_groups;
  p.scale_log2 = c.scale * kLog2e;
  p.inverse_scale = 1.0f / c.scale;
  return launch_variant<ROSE_VARIANTS>(c.variant, maps, p, c.num_blocks, c.stream);
}
