// Prefill attention for Hopper: bf16, head size 64, grouped queries, paged keys and values, sliding window, sinks.
//
// One block per multiprocessor walks a list of work items; an item is query rows of one sequence, all of one kv head
// (items.cuh). A producer warp copies the item's queries and its key and value tiles into shared
// memory with TMA; each consumer warpgroup owns a piece of 64 rows and keeps its scores, its probabilities (which are the A
// operand of the second product as they stand) and its output in registers. Tiles of keys are walked from the
// newest to the oldest, so that the causal mask is met first. The sink is where the running softmax starts: the
// maximum begins at its logit and the sum at one.
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
constexpr int kItemSlots = 4;                     // twice as many: an item is read after its queries are released
constexpr float kLowest = -1e30f;                 // finite, so that a row masked so far yields zeros and no NaN
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLazyLog2 = 8.0f;                 // lazy: probabilities may grow to 2^8 before a rescale

// What may vary; every combination computes the same thing.
struct Options {
  int warpgroups;        // consumers
  int tile;              // keys of a tile
  int stages;            // tiles of keys, and of values, in shared memory
  bool turns;            // warpgroups take turns at issuing products
  int polynomial;        // of every 8 pairs of exponentials, how many avoid the MUFU
  bool lazy;             // rescale only where a maximum grew by more than 2^8
  bool late = false;     // lazy, and a row's four threads share their maxima only where one grew so far
  bool integer = false;  // late, and growth is looked for with three-way integer maxima
  int parts = 1;         // products of scores per tile; the softmax of the first runs beside the second
  bool held = false;     // queries are held in registers
  int early = 0;         // steps of the second product that are issued after the turn is passed
  bool grouped = false;  // an item's rows come from several heads: GroupedItem
};

// By number; VARIANTS in cuda_impl.py has the words. Compiled are those whose bit is set in ROSE_VARIANTS.
constexpr Options kVariants[] = {
    {},                                                // 0: gone (no overlap of the two products)
    {2, 128, 4, false, 0, false},                      // 1
    {2, 128, 4, true, 0, false},                       // 2
    {3, 128, 4, false, 0, false},                      // 3
    {3, 128, 4, true, 0, false},                       // 4
    {3, 128, 4, true, 2, false},                       // 5
    {3, 128, 4, true, 0, true},                        // 6
    {3, 128, 4, true, 2, true},                        // 7
    {3, 64, 6, false, 0, false},                       // 8
    {2, 192, 3, true, 0, false},                       // 9
    {2, 192, 3, true, 2, true},                        // 10
    {2, 64, 6, false, 0, false},                       // 11
    {3, 128, 4, true, 0, true, true},                  // 12
    {3, 128, 4, true, 0, true, true, true},            // 13
    {3, 128, 4, false, 0, true, true},                 // 14
    {3, 128, 4, true, 1, true, true},                  // 15
    {3, 128, 4, true, 0, true, true, false, 2},        // 16
    {3, 128, 4, true, 0, true, true, true, 2},         // 17
    {4, 64, 6, false, 0, true, true},                  // 18
    {4, 64, 6, true, 0, true, true},                   // 19
    {4, 64, 6, false, 0, true, true, true},            // 20
    {2, 128, 4, true, 0, true, true, false, 1, true},  // 21
    {2, 128, 4, false, 0, true, true, true, 2, true},  // 22
    {3, 64, 6, false, 0, true, true, true},            // 23
    {3, 128, 4, true, 0, true, true, false, 1, false, 4},  // 24
    {3, 128, 4, true, 0, true, true, true, 1, false, 4},   // 25
    {3, 128, 4, true, 0, true, true, true, 2, false, 4},   // 26
    {3, 128, 4, true, 0, true, true, true, 1, false, 0, true},  // 27
};

template <int kVariant>
struct Config {
  static constexpr Options kOptions = kVariants[kVariant];
  static constexpr int kWarpgroups = kOptions.warpgroups;
  static constexpr int kTile = kOptions.tile;
  static constexpr int kStages = kOptions.stages;
  static constexpr bool kTurns = kOptions.turns;
  static constexpr int kPolynomial = kOptions.polynomial;
  static constexpr bool kLazy = kOptions.lazy;
  static constexpr bool kLate = kOptions.late;
  static constexpr bool kInteger = kOptions.integer;
  static constexpr int kParts = kOptions.parts;
  static constexpr bool kHeld = kOptions.held;
  static constexpr int kEarly = kOptions.early;
  static constexpr bool kGrouped = kOptions.grouped;
  static_assert(kTile % (16 * kParts) == 0, "a part is whole steps of the second product");
  static_assert(kLate || (!kInteger && kParts == 1), "written for late only");

  static constexpr int kPart = kTile / kParts;
  static constexpr int kScores = kPart / 2;  // of a part, in one thread
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kBoxes = kTile / kRows;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kQueryBytes = kQuerySlots * kWarpgroups * kBoxBytes;
  static constexpr int kNumBarriers = 4 * kWarpgroups + 4 * kStages;
  // Registers: 65536 / kThreads at launch, then producers hand theirs to consumers.
  static constexpr int kConsumerRegisters = kWarpgroups == 4 ? 112 : kWarpgroups == 3 ? 160 : 232;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;

  static int shared_bytes(int num_sequences) {
    return 1024 + kQueryBytes + 2 * kStages * kTileBytes + 8 * kNumBarriers +
           kItemSlots * kWarpgroups * int(sizeof(Piece)) + 4 * 3 * (num_sequences + 1);
  }
};

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
  float lazy_scores;  // what kLazyLog2 is in raw scores
};

// Where dynamic shared memory begins, rounded up to 1024: known, so that addresses cost the loop nothing. The first
// KiB belongs to the driver; a profile keeps a few static words after it.
constexpr uint32_t kBase = kIsProfiled ? 2048 : 1024;

__device__ __forceinline__ void check_base(const uint8_t* raw) {
  if (((shared_address(raw) + 1023) & ~1023u) != kBase) __trap();
}

// Shared memory, by address. Barriers: queries full and empty [slot][warpgroup], keys and values full and empty [stage].
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
  __device__ uint32_t key_full(int stage) const { return base + kBarriers + 8 * (4 * C::kWarpgroups + stage); }
  __device__ uint32_t key_empty(int stage) const { return key_full(stage) + 8 * C::kStages; }
  __device__ uint32_t value_full(int stage) const { return key_full(stage) + 16 * C::kStages; }
  __device__ uint32_t value_empty(int stage) const { return key_full(stage) + 24 * C::kStages; }
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

// ---- producer: one warp ---------------------------------------------------------------------------------------

template <class C>
__device__ void produce(const Parameters& p, const Shared<C>& shared, uint8_t* raw, const CUtensorMap* map_q,
                        const CUtensorMap* map_kv) {
  const int lane = threadIdx.x & 31;
  const Tables tables(shared.tables(raw), p.num_sequences);
  const Cut cut = cut_of<C>(p);
  Place<C::kStages> place;
  Place<kQuerySlots> slot;
  Walk walk{int(blockIdx.x), int(gridDim.x)};
  for (int count = 0;; ++count, slot.advance()) {
    const int index = walk.next(num_items<C>(p, tables));
    ItemOf<C> item;
    if (index >= 0) find_item(tables, p.num_sequences, cut, index, item);
    hand_out<C>(item, index, cut, shared, raw, map_q, count, slot);
    if (index < 0) break;
    // Lane i copies box i of each tile. Pages that hold no token of any row's reach are not looked up: row -64 is
    // outside the tensor and reads as zeros, which a probability of zero cannot turn into NaN.
    const int* table = p.page_table + int64_t(item.sequence) * p.page_stride;
    const int first_page = max(0, item.position - p.window + 1) / p.page_tokens;
    const int end_page = (item.length + p.page_tokens - 1) / p.page_tokens;
    auto find_row = [&](int tile) {
      int token = tile * C::kTile + lane * kRows;
      int column = token / p.page_tokens;
      bool is_held = tile >= item.tile_low && lane < C::kBoxes && column >= first_page && column < end_page;
      int page = is_held ? table[column] : -1;
      return page < 0 ? -1 : (page * 2 * p.num_groups + item.group) * p.page_tokens + token - column * p.page_tokens;
    };
    int row_ahead = find_row(item.tile_high);
    for (int tile = item.tile_high; tile >= item.tile_low; --tile, place.advance()) {
      const int row = row_ahead;
      row_ahead = find_row(tile - 1);
      const int key_row = row < 0 ? -kRows : row;
      const int value_row = row < 0 ? -kRows : row + p.num_groups * p.page_tokens;
      mbarrier_wait(shared.key_empty(place.stage), place.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expect(shared.key_full(place.stage), C::kTileBytes);
      __syncwarp();
      if (lane < C::kBoxes) {
        tma_load_2d(shared.key(place.stage) + lane * kBoxBytes, map_kv, shared.key_full(place.stage), 0, key_row);
      }
      mbarrier_wait(shared.value_empty(place.stage), place.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expect(shared.value_full(place.stage), C::kTileBytes);
      __syncwarp();
      if (lane < C::kBoxes) {
        tma_load_2d(shared.value(place.stage) + lane * kBoxBytes, map_kv, shared.value_full(place.stage), 0,
                    value_row);
      }
    }
  }
  // Stay until every tile is consumed, so that a stuck consumer meets the watchdog here.
  for (int i = 0; i < C::kStages; ++i, place.advance()) {
    mbarrier_wait(shared.key_empty(place.stage), place.parity ^ 1);
    mbarrier_wait(shared.value_empty(place.stage), place.parity ^ 1);
  }
}

// ---- consumers ------------------------------------------------------------------------------------------------

// What the rows of a thread (g and g + 8 of its warp) have come to.
struct Running {
  float maximum[2], sum[2];
  float factor[2];  // by which the output so far has to be multiplied, if is_grown
  bool is_grown;
};

// The largest raw score of each row in this thread's columns and before.
template <class C>
__device__ __forceinline__ void find_tops(const float (&s)[C::kScores], const float (&maximum)[2], float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float a = fmaxf(maximum[h], s[2 * h]), b = s[2 * h + 1];
#pragma unroll
    for (int j = 1; j < C::kPart / 8; ++j) {
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

// Whether some score may lie more than 2^8 above its row's maximum. Floats that are not negative are ordered as
// their bits are as integers, and negative ones lie below them: right where the limit is not negative, so that a
// negative one counts as grown.
template <class C>
__device__ __forceinline__ bool may_have_grown(const float (&s)[C::kScores], const float (&maximum)[2],
                                               float lazy_scores) {
  bool is_grown = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int a = __float_as_int(s[2 * h]), b = __float_as_int(s[2 * h + 1]);
#pragma unroll
    for (int j = 1; j + 1 < C::kPart / 8; j += 2) {
      a = __vimax3_s32(a, __float_as_int(s[4 * j + 2 * h]), __float_as_int(s[4 * j + 4 + 2 * h]));
      b = __vimax3_s32(b, __float_as_int(s[4 * j + 2 * h + 1]), __float_as_int(s[4 * j + 5 + 2 * h]));
    }
    if constexpr (C::kPart / 8 % 2 == 0) {
      a = __vimax3_s32(a, b, max(__float_as_int(s[C::kScores - 4 + 2 * h]), __float_as_int(s[C::kScores - 3 + 2 * h])));
    } else {
      a = max(a, b);
    }
    const int limit = __float_as_int(maximum[h] + lazy_scores);
    is_grown |= limit < 0 || a > limit;
  }
  return is_grown;
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
    for (int j = 0; j < C::kPart / 8; ++j) {
      float& low = s[4 * j + 2 * h];
      float& high = s[4 * j + 2 * h + 1];
      low = fmaf(low, p.scale_log2, offset);
      high = fmaf(high, p.scale_log2, offset);
      // Spread evenly over the tile, so that both pipes are busy all the time.
      if ((j * C::kPolynomial) % 8 + C::kPolynomial >= 8 && C::kPolynomial > 0) {
        low = exp2_polynomial(low);
        high = exp2_polynomial(high);
      } else {
        low = exp2_mufu(low);
        high = exp2_mufu(high);
      }
      a += low;
      b += high;
    }
    sum[h] = a + b;
  }
}

// Take one part of a tile of raw scores into the running softmax; scores become probabilities, relative to the
// maximum. Sets r.factor and r.is_grown for the tile.
template <class C, int kIndex>
__device__ __forceinline__ void take_scores(float (&parts)[C::kParts][C::kScores], Running& r, const Parameters& p) {
  float(&s)[C::kScores] = parts[kIndex];
  float top[2];
  if constexpr (kIndex == 0) r.is_grown = !C::kLazy;
  if constexpr (C::kLate) {
    bool is_grown;
    if constexpr (C::kInteger) {
      is_grown = may_have_grown<C>(s, r.maximum, p.lazy_scores);
    } else {
      find_tops<C>(s, r.maximum, top);
      is_grown = fmaxf(top[0] - r.maximum[0], top[1] - r.maximum[1]) * p.scale_log2 > kLazyLog2;
    }
    if (__any_sync(~0u, is_grown)) {
      if constexpr (C::kInteger) find_tops<C>(s, r.maximum, top);
      share_tops(top);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = exp2_mufu((r.maximum[h] - top[h]) * p.scale_log2);
        r.maximum[h] = top[h];
        r.sum[h] *= factor;
        r.factor[h] = kIndex > 0 && r.is_grown ? r.factor[h] * factor : factor;
        if constexpr (kIndex > 0) {
#pragma unroll
          for (int i = 0; i < C::kScores; ++i) {
            if ((i >> 1 & 1) == h) parts[0][i] *= factor;
          }
        }
      }
      r.is_grown = true;
    }
  } else {
    find_tops<C>(s, r.maximum, top);
    share_tops(top);
    if constexpr (C::kLazy) {
      float growth = fmaxf(top[0] - r.maximum[0], top[1] - r.maximum[1]) * p.scale_log2;
      r.is_grown = __any_sync(~0u, growth > kLazyLog2);
      if (!r.is_grown) {
        top[0] = r.maximum[0];
        top[1] = r.maximum[1];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      r.factor[h] = exp2_mufu((r.maximum[h] - top[h]) * p.scale_log2);
      r.maximum[h] = top[h];
      r.sum[h] *= r.factor[h];
    }
  }
  float sum[2];
  exponentiate<C>(s, r.maximum, p, sum);
  r.sum[0] += sum[0];
  r.sum[1] += sum[1];
}

// Mask what a row must not see. `last` is the row's position minus the column of this thread's first score.
template <class C>
__device__ __forceinline__ void mask_scores(float (&s)[C::kScores], const int (&last)[2], int window) {
#pragma unroll
  for (int j = 0; j < C::kPart / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * j + (e & 1), limit = last[e >> 1];
      if (column > limit || column <= limit - window) s[4 * j + e] = -INFINITY;
    }
  }
}

template <class C>
__device__ __forceinline__ void pack_probabilities(const float (&s)[C::kParts][C::kScores],
                                                   uint32_t (&packed)[C::kTile / 16][4]) {
#pragma unroll
  for (int k = 0; k < C::kTile / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * k + 2 * i;
      packed[k][i] = pack_bf16(s[at / C::kScores][at % C::kScores], s[at / C::kScores][at % C::kScores + 1]);
    }
  }
}

// A warpgroup's queries as an operand: a descriptor, or the fragments themselves.
template <class C>
struct Queries {
  uint64_t descriptor;
  uint32_t held[C::kHeld ? kHeadDim / 16 : 1][4];

  // Elements 16k to 16k + 15 of this warp's rows.
  __device__ static __forceinline__ void load(uint32_t (&a)[4], uint32_t address, int k) {
    const int row = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 15), half = threadIdx.x >> 4 & 1;
    load_matrices(a, address + row * kRowBytes + (((2 * k + half) ^ (row & 7)) << 4));
  }

  __device__ __forceinline__ void take(uint32_t address) {
    if constexpr (!C::kHeld) {
      descriptor = descriptor_swizzle128(address);
    } else {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) load(held[k], address, k);
    }
  }
};

template <class C>
__device__ __forceinline__ void issue_part(float (&s)[C::kScores], const Queries<C>& query, uint32_t keys) {
  const uint64_t key = descriptor_swizzle128(keys);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    if constexpr (C::kHeld) {
      wgmma_bf16<C::kPart>(s, query.held[k], advance(key, 32 * k), k > 0);
    } else {
      wgmma_bf16<C::kPart>(s, advance(query.descriptor, 32 * k), advance(key, 32 * k), k > 0);
    }
  }
  wgmma_commit();
}

template <class C>
__device__ __forceinline__ void issue_scores(float (&s)[C::kParts][C::kScores], const Queries<C>& query,
                                             uint32_t keys) {
#pragma unroll
  for (int part = 0; part < C::kParts; ++part) issue_part<C>(s[part], query, keys + part * C::kPart * kRowBytes);
}

// pass() is called kEarly steps before the end.
template <class C, class Pass>
__device__ __forceinline__ void issue_output(float (&o)[32], const uint32_t (&packed)[C::kTile / 16][4],
                                             uint32_t values, Pass pass) {
  const uint64_t value = descriptor_swizzle128(values);
#pragma unroll
  for (int k = 0; k < C::kTile / 16; ++k) {
    if (C::kEarly > 0 && k == C::kTile / 16 - C::kEarly) pass();
    wgmma_bf16_mn<kHeadDim>(o, packed[k], advance(value, 16 * kRowBytes * k), 1);
  }
  wgmma_commit();
  if constexpr (C::kEarly == 0) pass();
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

template <class C>
__device__ __forceinline__ void consume(const Parameters& p, const Shared<C>& shared, uint8_t* raw, const int wg) {
  // HAZARD: registers. With three warpgroups a thread has 160, of which the arrays take 128; so little else is kept
  // across the loop over tiles, and the rest is read again from the item.
  const bool is_signaller = (threadIdx.x & 31) == 0;
  const int row = ((threadIdx.x >> 5) & 3) * 16 + (threadIdx.x & 31) / 4;  // of this thread in its warpgroup
  float s[C::kParts][C::kScores], o[32];
  Running r;
  Queries<C> query;
  Profile profile;
  uint32_t packed[C::kTile / 16][4];

  auto release = [&](uint32_t barrier) {
    if (is_signaller) mbarrier_arrive(barrier);
  };
  auto stage = [](unsigned tiles) { return tiles % C::kStages; };
  auto parity = [](unsigned tiles) { return tiles / C::kStages & 1; };
  // Turns: barrier 1 + i opens warpgroup i, once per tile of an item, also where it has nothing to compute.
  auto take_turn = [&] {
    if constexpr (C::kTurns) named_sync(1 + wg, 256);
  };
  auto pass_turn = [&] {
    if constexpr (C::kTurns) named_arrive(wg == C::kWarpgroups - 1 ? 1 : 2 + wg, 256);
  };
  auto settle_probabilities = [&] {
#pragma unroll
    for (int k = 0; k < C::kTile / 16; ++k) settle(packed[k]);
  };
  if (C::kTurns && wg == C::kWarpgroups - 1) named_arrive(1, 256);

  profile.start();
  unsigned tiles = 0;  // taken from the ring of keys so far; values lag by one inside an item
  auto skip_tile = [&] {
    take_turn();
    pass_turn();
    mbarrier_wait(shared.key_full(stage(tiles)), parity(tiles));
    release(shared.key_empty(stage(tiles)));
    mbarrier_wait(shared.value_full(stage(tiles)), parity(tiles));
    release(shared.value_empty(stage(tiles)));
    ++tiles;
  };
  for (unsigned count = 0;; ++count) {
    const int slot = count % kQuerySlots;
    mbarrier_wait(shared.query_full(slot, wg), count / kQuerySlots & 1);
    const Piece* piece = shared.piece(raw, count % kItemSlots, wg);
    int tile = piece->tile_high;
    if (tile < 0) return;
    const int position = piece->position, high = piece->high, low = piece->low;
    for (; tile > high; --tile) skip_tile();
    if (high < low) {
      release(shared.query_empty(slot, wg));
      continue;
    }
    query.take(shared.query(slot, wg));
    if constexpr (C::kHeld) {
      __syncwarp();
      release(shared.query_empty(slot, wg));
    }
    auto take_part = [&](auto part) {
      constexpr int kIndex = decltype(part)::value;
      const int column = tile * C::kTile + kIndex * C::kPart;
      settle(s[kIndex]);
      if (column + C::kPart - 1 > position || column <= position + kRows - 1 - p.window) {
        const int last = position + row - column - 2 * int(threadIdx.x & 3);
        mask_scores<C>(s[kIndex], {last, last + 8}, p.window);
      }
      take_scores<C, kIndex>(s, r, p);
    };
    const float sink = p.sinks[piece->head] * p.inverse_scale;
    r.maximum[0] = r.maximum[1] = fmaxf(sink, kLowest);
    // Each thread of a quad sums its own columns; one of them also holds the sink.
    r.sum[0] = r.sum[1] = (threadIdx.x & 3) == 0 ? exp2_mufu((sink - r.maximum[0]) * p.scale_log2) : 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] = 0.0f;

    // First tile: scores and softmax only.
    mbarrier_wait(shared.key_full(stage(tiles)), parity(tiles));
    take_turn();
    wgmma_fence();
    issue_scores<C>(s, query, shared.key(stage(tiles)));
    pass_turn();
    wgmma_wait<0>();
    release(shared.key_empty(stage(tiles)));
    take_part(std::integral_constant<int, 0>{});
    if constexpr (C::kParts == 2) take_part(std::integral_constant<int, 1>{});
    pack_probabilities<C>(s, packed);
    if ((tile + 1) * C::kTile > piece->length) {
      mbarrier_wait(shared.value_full(stage(tiles)), parity(tiles));
      clear_values(shared.value(stage(tiles)), piece->length - tile * C::kTile, C::kTile, wg);
    }
    // Between: the scores of a tile beside the output of the one before it.
    profile.mark(kOutsideLoop);
    for (--tile; tile >= low; --tile) {
      const unsigned before = tiles++;
      mbarrier_wait(shared.key_full(stage(tiles)), parity(tiles));
      mbarrier_wait(shared.value_full(stage(before)), parity(before));
      profile.mark(kData);
      take_turn();
      profile.mark(kTurn);
      wgmma_fence();
      issue_scores<C>(s, query, shared.key(stage(tiles)));
      issue_output<C>(o, packed, shared.value(stage(before)), pass_turn);
      // ptxas moves a wait above the exponentials before it unless something it may not reorder hangs on their
      // result; a sum is never negative. (SASS of CUDA 13.0; without it nothing overlaps the product that is waited
      // for.) After the last part that is the release of the keys, although they were free since the scores came.
      if constexpr (C::kParts == 2) {
        wgmma_wait<2>();
        profile.mark(kScoresWait);
        take_part(std::integral_constant<int, 0>{});
        if (is_signaller && r.sum[0] + r.sum[1] < 0.0f) mbarrier_arrive(shared.key_empty(stage(tiles)));
        profile.mark(kSoftmax);
      }
      wgmma_wait<1>();
      profile.mark(kScoresWait);
      take_part(std::integral_constant<int, C::kParts - 1>{});
      if (is_signaller && !(r.sum[0] + r.sum[1] < 0.0f)) mbarrier_arrive(shared.key_empty(stage(tiles)));
      profile.mark(kSoftmax);
      wgmma_wait<0>();
      profile.mark(kOutputWait);
      // The packing stays below the wait: above, it would need registers beside those in flight.
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) settle(s[part]);
      settle(o);
      settle_probabilities();
      release(shared.value_empty(stage(before)));
      if (r.is_grown) {
#pragma unroll
        for (int i = 0; i < 32; ++i) o[i] *= r.factor[(i >> 1) & 1];
      }
      pack_probabilities<C>(s, packed);
      profile.mark(kPack);
    }
    // Last: the output of the oldest tile.
    if constexpr (!C::kHeld) release(shared.query_empty(slot, wg));
    mbarrier_wait(shared.value_full(stage(tiles)), parity(tiles));
    wgmma_fence();
    issue_output<C>(o, packed, shared.value(stage(tiles)), [] {});
    wgmma_wait<0>();
    settle(o);
    settle_probabilities();
    release(shared.value_empty(stage(tiles)));
    ++tiles;
    __nv_bfloat16* out = p.out + (int64_t(piece->first_row) * p.num_heads + piece->head) * kHeadDim;
    store_output(out, p.num_heads * kHeadDim, o, r.sum, row, 0, piece->num_rows);
    for (; tile >= piece->tile_low; --tile) skip_tile();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_prefill(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_kv,
                      const __grid_constant__ Parameters p) {
  extern __shared__ uint8_t raw[];
  check_base(raw);
  const Shared<C> shared;
  BlockProfile profile;
  profile.start();
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map_q);
    tma_prefetch_map(&map_kv);
    for (int slot = 0; slot < kQuerySlots; ++slot) {
      for (int wg = 0; wg < C::kWarpgroups; ++wg) {
        mbarrier_init(shared.query_full(slot, wg), 1);
        mbarrier_init(shared.query_empty(slot, wg), 4);  // one arrival per warp
      }
    }
    for (int stage = 0; stage < C::kStages; ++stage) {
      mbarrier_init(shared.key_full(stage), 1);
      mbarrier_init(shared.value_full(stage), 1);
      mbarrier_init(shared.key_empty(stage), 4 * C::kWarpgroups);
      mbarrier_init(shared.value_empty(stage), 4 * C::kWarpgroups);
    }
    mbarrier_init_fence();
  }
  count_items<C>(p, Tables(shared.tables(raw), p.num_sequences));
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<C::kProducerRegisters>();
    if (threadIdx.x < 32) produce<C>(p, shared, raw, &map_q, &map_kv);
  } else {
    registers_grow<C::kConsumerRegisters>();
    consume<C>(p, shared, raw, __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0));
  }
  profile.finish();
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
  attention_prefill<C><<<num_blocks, C::kThreads, C::shared_bytes(p.num_sequences), stream>>>(maps.q, maps.kv, p);
  return cudaGetLastError();
}

template <class C>
cudaError_t launch_streamed(const Maps& maps, const Parameters& p, int num_blocks, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  const cudaError_t error = allow_shared(attention_prefill_streamed<C>, C::shared_bytes(kMaxSequences), done);
  if (error != cudaSuccess) return error;
  attention_prefill_streamed<C>
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
constexpr int kNumVariants = sizeof(kVariants) / sizeof(Options);
constexpr int kEndStreamed = kFirstStreamed + sizeof(kStreamed) / sizeof(StreamOptions);
static_assert(kNumVariants <= kFirstStreamed && kEndStreamed <= kWindowVariant, "numbers are taken twice");

constexpr bool is_compiled(int variant) { return uint64_t(ROSE_VARIANTS) >> variant & 1; }

// Variant kNumber or one after it.
template <int kNumber = 0>
cudaError_t launch_variant(int variant, const Maps& maps, const Parameters& p, int num_blocks, cudaStream_t stream) {
  if constexpr (kNumber < kNumVariants) {
    if constexpr (is_compiled(kNumber)) {
      if (variant == kNumber) return launch<Config<kNumber>>(maps, p, num_blocks, stream);
    }
    return launch_variant<kNumber + 1>(variant, maps, p, num_blocks, stream);
  } else if constexpr (kNumber < kEndStreamed) {
    if constexpr (kNumber >= kFirstStreamed && is_compiled(kNumber)) {
      if (variant == kNumber) return launch_streamed<StreamConfig<kNumber>>(maps, p, num_blocks, stream);
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
  int variant;      // a row of kVariants, or kWindowVariant
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
  p.lazy_scores = kLazyLog2 / p.scale_log2;
  return launch_variant(c.variant, maps, p, c.num_blocks, c.stream);
}
