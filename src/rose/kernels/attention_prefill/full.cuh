// Layers without a window, or with a wide one: a running softmax without maxima. Part of kernel_sm90.cu.
//
// A probability is rounded to bf16, which has the exponents of float32: what it is relative to decides its accuracy
// only where it leaves their range. So the maximum of a row's first tile stays until a tile's sums say that some score
// lies far above it; that tile's scores are made again, warp by warp, and the maximum is raised. Exponentials then
// need nothing but their own score.
#pragma once

// A thread's sum of a tile's probabilities, from which on its maximum is raised. Sums of 2^20 keys stay finite, and
// a probability that is lost beside it (2^-126) is lost in float32 too.
constexpr float kTrustedSum = 18446744073709551616.0f;  // 2^64

constexpr int kWarpgroups = 3;      // consumers
constexpr int kTile = 128;          // keys of a tile; keys and values of one share a barrier
constexpr int kStages = 4;          // tiles of keys, and of values, in shared memory
constexpr int kScores = kTile / 2;  // of a tile, in one thread
constexpr int kBoxes = kTile / kRows;
constexpr int kTileBytes = kTile * kRowBytes;
static_assert((kStages & (kStages - 1)) == 0, "places in the ring are low bits of a count");
constexpr int kQuerySlots = 2;  // items whose queries are in shared memory
constexpr int kItemSlots = 4;   // items whose pieces are in shared memory
static_assert(kItemSlots == 2 * kQuerySlots, "a piece is read after its queries are released");

// Shared memory, by address. Barriers: queries full and empty [slot][warpgroup], tiles full and empty [stage].
struct FullShared {
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kQueryBytes = kQuerySlots * kWarpgroups * kBoxBytes;
  static constexpr int kNumBarriers = 4 * kWarpgroups + 2 * kStages;
  static constexpr uint32_t base = kBase;
  static constexpr uint32_t kKeys = kQueryBytes;
  static constexpr uint32_t kValues = kKeys + kStages * kTileBytes;
  static constexpr uint32_t kBarriers = kValues + kStages * kTileBytes;
  static constexpr uint32_t kPieces = kBarriers + 8 * kNumBarriers;
  static constexpr uint32_t kTables = kPieces + kItemSlots * kWarpgroups * sizeof(Piece);
  static int bytes(int num_sequences) { return 1024 + kTables + 4 * 3 * (num_sequences + 1); }

  __device__ uint32_t query(int slot, int wg) const { return base + (slot * kWarpgroups + wg) * kBoxBytes; }
  __device__ uint32_t key(int stage) const { return base + kKeys + stage * kTileBytes; }
  __device__ uint32_t value(int stage) const { return base + kValues + stage * kTileBytes; }
  __device__ uint32_t query_full(int slot, int wg) const {
    return base + kBarriers + 8 * (slot * kWarpgroups + wg);
  }
  __device__ uint32_t query_empty(int slot, int wg) const { return query_full(slot, wg) + 16 * kWarpgroups; }
  __device__ uint32_t tile_full(int stage) const { return base + kBarriers + 8 * (4 * kWarpgroups + stage); }
  __device__ uint32_t tile_empty(int stage) const { return tile_full(stage) + 8 * kStages; }
  __device__ Piece* piece(uint8_t* raw, int slot, int wg) const {
    return reinterpret_cast<Piece*>(raw + (base - shared_address(raw)) + kPieces) + slot * kWarpgroups + wg;
  }
  __device__ int* tables(uint8_t* raw) const {
    return reinterpret_cast<int*>(raw + (base - shared_address(raw)) + kTables);
  }
};

// mbarrier_wait for a whole warp whose way out of it is known to be the same: where it lies in a loop that is not the
// main one, ptxas takes whatever follows for divergent otherwise.
__device__ __forceinline__ void wait_together(uint32_t barrier, uint32_t parity) {
  if constexpr (kWatchdog) {
    mbarrier_wait(barrier, parity);
  } else {
    while (!__all_sync(~0u, mbarrier_try_wait(barrier, parity))) {
    }
  }
}

// ---- producer: one warp, the same in all its lanes but for the look-up of pages ----------------------------------

__device__ __forceinline__ Cut cut_of(const Parameters& p) {
  return {kWarpgroups, kTile, p.window, p.section_groups, p.heads_per_group};
}

// The producer warp hands item `index` (-1: no more work) to the warpgroups and starts the copy of its queries.
// Who may touch a piece: a lane writes it and arrives at query_full itself, which all readers wait for. It is written
// again four items later, after query_empty of the item two later: before its warp arrives there, lanes that read the
// piece met in the shuffles of walk_items.
__device__ __forceinline__ void hand_out(const Item& item, int index, const Cut& cut, const FullShared& shared,
                                         uint8_t* raw, const CUtensorMap* map_q, unsigned count,
                                         const Cursor<kQuerySlots>& slot) {
  const int lane = threadIdx.x & 31;
  if (lane < kWarpgroups) {
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

__device__ void produce(const Parameters& p, const FullShared& shared, uint8_t* raw, const CUtensorMap* map_q,
                        const CUtensorMap* map_kv) {
  const int lane = threadIdx.x & 31;
  const Tables tables(shared.tables(raw), p.num_sequences);
  const Cut cut = cut_of(p);
  const int value_step = p.num_groups * p.page_tokens;
  Cursor<kStages> place;
  Cursor<kQuerySlots> slot;
  Walk walk{int(blockIdx.x), int(gridDim.x)};
  for (int count = 0;; ++count, slot.advance()) {
    const int index = walk.next(tables.tiles_before[p.num_sequences] * p.num_groups);
    Item item;
    if (index >= 0) item = find_item(tables, p.num_sequences, cut, index);
    hand_out(item, index, cut, shared, raw, map_q, count, slot);
    if (index < 0) break;
    // Each lane looks one box of 64 keys up, newest first, 32 ahead of those in hand. Pages that hold no token of any
    // row's reach are not looked up: row -64 is outside the tensor and reads as zeros, which a probability of zero
    // cannot turn into NaN.
    const int* table = p.page_table + int64_t(item.sequence) * p.page_stride;
    const int first_page = max(0, item.position - p.window + 1) / p.page_tokens;
    const int end_page = (item.length + p.page_tokens - 1) / p.page_tokens;
    const int newest = (item.tile_high + 1) * kBoxes - 1;
    const int num_boxes = uniform((item.tile_high - item.tile_low + 1) * kBoxes);
    auto find_row = [&](int box) {
      const int token = box * kRows, column = token / p.page_tokens;
      const bool is_held = box >= 0 && column >= first_page && column < end_page;
      const int page = is_held ? table[column] : -1;
      if (page < 0) return -kRows;
      return (page * 2 * p.num_groups + item.group) * p.page_tokens + token - column * p.page_tokens;
    };
    int row_ahead = find_row(newest - lane), rows = 0;
    for (int box = 0; box < num_boxes; box += kBoxes, place.advance()) {
      if (box % 32 == 0) {
        rows = row_ahead;
        row_ahead = find_row(newest - lane - box - 32);
      }
      mbarrier_wait(shared.tile_empty(place.stage), place.parity ^ 1);
      const uint32_t full = shared.tile_full(place.stage);
      if (lane == 0) mbarrier_arrive_expect(full, 2 * kTileBytes);
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        const int row = uniform(__shfl_sync(~0u, rows, (box + i) % 32));
        const int at = (kBoxes - 1 - i) * kBoxBytes;
        if (lane == 0) {
          tma_load_2d(shared.key(place.stage) + at, map_kv, full, 0, row);
          tma_load_2d(shared.value(place.stage) + at, map_kv, full, 0, row < 0 ? row : row + value_step);
        }
      }
      __syncwarp();
    }
  }
  // Stay until every tile is consumed, so that a stuck consumer meets the watchdog here.
  for (int i = 0; i < kStages; ++i, place.advance()) {
    mbarrier_wait(shared.tile_empty(place.stage), place.parity ^ 1);
  }
}

// ---- consumers ------------------------------------------------------------------------------------------------

// What the rows of a thread (g and g + 8 of its warp) have come to.
struct Running {
  float maximum[2], sum[2];
  float factor[2];  // by which the output so far has to be multiplied, where the maxima were raised
};

// The largest raw score of each row in this thread's columns and before.
__device__ __forceinline__ void find_tops(const float (&s)[kScores], const float (&maximum)[2], float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float a = fmaxf(maximum[h], s[2 * h]), b = s[2 * h + 1];
#pragma unroll
    for (int j = 1; j < kTile / 8; ++j) {
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
__device__ __forceinline__ void exponentiate(float (&s)[kScores], const float (&maximum)[2], const Parameters& p,
                                             float (&sum)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float offset = -maximum[h] * p.scale_log2;
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
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
__device__ __forceinline__ void mask_scores(float (&s)[kScores], const int (&last)[2], int window) {
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * j + (e & 1), limit = last[e >> 1];
      if (column > limit || column <= limit - window) s[4 * j + e] = -INFINITY;
    }
  }
}

// `queries`: descriptor of the warpgroup's 64 rows.
__device__ __forceinline__ void issue_scores(float (&s)[kScores], uint64_t queries, uint32_t keys) {
  const uint64_t key = descriptor_swizzle128(keys);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    wgmma_bf16<kTile>(s, advance(queries, 32 * k), advance(key, 32 * k), k > 0);
  }
  wgmma_commit();
}

__device__ __forceinline__ void issue_output(float (&o)[32], const uint32_t (&packed)[kTile / 16][4],
                                             uint32_t values) {
  const uint64_t value = descriptor_swizzle128(values);
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
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

// The ring of tiles as a consumer warp sees it; `tiles` is what it counts by.
struct Ring {
  const FullShared& shared;
  const bool is_signaller;
  unsigned tiles = 0;

  __device__ uint32_t key(unsigned n) const { return shared.key(n % kStages); }
  __device__ uint32_t value(unsigned n) const { return shared.value(n % kStages); }
  __device__ void wait(unsigned n) const { mbarrier_wait(shared.tile_full(n % kStages), n / kStages & 1); }
  __device__ void signal(uint32_t barrier) const {
    if (is_signaller) mbarrier_arrive(barrier);
  }
  __device__ void release(unsigned n) const { signal(shared.tile_empty(n % kStages)); }
  // Turns: barrier 1 + i opens warpgroup i, once per tile of an item, also where it has nothing to compute.
  __device__ void take_turn(int wg) const { named_sync(1 + wg, 256); }
  __device__ void pass_turn(int wg) const { named_arrive(wg == kWarpgroups - 1 ? 1 : 2 + wg, 256); }
  __device__ void skip(int more, int wg) {
    for (; more > 0; --more, ++tiles) {
      take_turn(wg);
      pass_turn(wg);
      wait_together(shared.tile_full(tiles % kStages), tiles / kStages & 1);
      release(tiles);
    }
    tiles = uniform(tiles);
  }
};

// A warpgroup's piece, and what of it is known to be the same in all threads.
struct Stretch {
  const Piece* piece;
  int slot;
  int position, high, low;
};

// attend(stretch) for every item that this warpgroup has rows of.
template <class Attend>
__device__ __forceinline__ void walk_items(Ring& ring, uint8_t* raw, int wg, Attend attend) {
  const FullShared& shared = ring.shared;
  if (wg == kWarpgroups - 1) named_arrive(1, 256);
  for (unsigned count = 0;; ++count) {
    const int slot = count % kQuerySlots;
    mbarrier_wait(shared.query_full(slot, wg), count / kQuerySlots & 1);
    const Piece* piece = shared.piece(raw, count % kItemSlots, wg);
    const int tile_high = uniform(piece->tile_high), tile_low = uniform(piece->tile_low);
    if (tile_high < 0) return;
    const int position = uniform(piece->position), high = uniform(piece->high), low = uniform(piece->low);
    ring.skip(tile_high - high, wg);
    if (high < low) {
      ring.signal(shared.query_empty(slot, wg));
      continue;
    }
    attend(Stretch{piece, slot, position, high, low});
    ring.skip(low - tile_low, wg);
  }
}

// Before the first score: the sink.
__device__ __forceinline__ void start_softmax(Running& r, const Parameters& p, int head) {
  const float sink = p.sinks[head] * p.inverse_scale;
  r.maximum[0] = r.maximum[1] = fmaxf(sink, kLowest);
  // Each thread of a quad sums its own columns; one of them also holds the sink.
  r.sum[0] = r.sum[1] = (threadIdx.x & 3) == 0 ? exp2_mufu((sink - r.maximum[0]) * p.scale_log2) : 0.0f;
}

// Mask scores of kTile columns from `column` on, where some row must not see all of them.
__device__ __forceinline__ void mask_edges(float (&s)[kScores], const Stretch& stretch, int column, int window) {
  if (column + kTile - 1 > stretch.position || column <= stretch.position + kRows - 1 - window) {
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (threadIdx.x & 31) / 4;
    const int last = stretch.position + row - column - 2 * int(threadIdx.x & 3);
    mask_scores(s, {last, last + 8}, window);
  }
}

// Raise the maxima to what scores demand; sums follow, r.factor is for the output.
__device__ __forceinline__ void raise_maxima(const float (&s)[kScores], Running& r, const Parameters& p) {
  float top[2];
  find_tops(s, r.maximum, top);
  share_tops(top);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    r.factor[h] = exp2_mufu((r.maximum[h] - top[h]) * p.scale_log2);
    r.maximum[h] = top[h];
    r.sum[h] *= r.factor[h];
  }
}

// The scores of one warp's rows, without its warpgroup.
__device__ __forceinline__ void score_again(float (&s)[kScores], uint32_t queries, uint32_t keys) {
  const int lane = threadIdx.x & 31, key = (lane >> 4) * 8 + (lane & 7), half = lane >> 3 & 1;
  const int row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    uint32_t a[4];  // elements 16k to 16k + 15 of this warp's rows
    load_matrices(a, queries + row * kRowBytes + (((2 * k + (lane >> 4)) ^ (row & 7)) << 4));
#pragma unroll
    for (int j = 0; j < kTile / 8; j += 2) {
      uint32_t b[4];
      load_matrices(b, keys + (8 * j + key) * kRowBytes + (((2 * k + half) ^ (key & 7)) << 4));
      multiply_bf16(s + 4 * j, a, b[0], b[1]);
      multiply_bf16(s + 4 * j + 4, a, b[2], b[3]);
    }
  }
}

// Scores become probabilities; redo() makes the scores again where the maxima have to be raised. Products on `o` may be
// in flight; others' results are not touched.
template <class Redo>
__device__ __forceinline__ void take_trusting(float (&s)[kScores], float (&o)[32], Running& r, const Parameters& p,
                                              Redo redo) {
  float sum[2];
  exponentiate(s, r.maximum, p, sum);
  // Also where a sum is infinite. Besides, no wait after this branch is moved above the exponentials.
  if (__builtin_expect(__any_sync(~0u, !(sum[0] + sum[1] < kTrustedSum)), 0)) {
    redo();
    raise_maxima(s, r, p);
    exponentiate(s, r.maximum, p, sum);
    wgmma_wait<0>();
    settle(o);
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] *= r.factor[(i >> 1) & 1];
  }
  r.sum[0] += sum[0];
  r.sum[1] += sum[1];
}

__device__ __forceinline__ void pack_scores(const float (&s)[kScores], uint32_t (&packed)[kTile / 16][4]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) packed[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void settle_packed(uint32_t (&packed)[kTile / 16][4]) {
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) settle(packed[k]);
}

// Divide by the sums and write the rows of a stretch.
__device__ __forceinline__ void store_stretch(const Parameters& p, const Stretch& stretch, const float (&o)[32],
                                              const Running& r) {
  const Piece* piece = stretch.piece;
  const int row = ((threadIdx.x >> 5) & 3) * 16 + (threadIdx.x & 31) / 4;
  __nv_bfloat16* out = p.out + (int64_t(piece->first_row) * p.num_heads + piece->head) * kHeadDim;
  store_output(out, p.num_heads * kHeadDim, o, r.sum, row, 0, piece->num_rows);
}

// Warpgroups take turns at issuing products; the output of a tile is made beside the exponentials of the next.
__device__ __forceinline__ void consume(const Parameters& p, const FullShared& shared, uint8_t* raw, const int wg) {
  // HAZARD: registers. A thread has 160, of which the arrays take 128; so little else is kept across the loop over
  // tiles, and the rest is read again from the piece.
  float s[kScores], o[32];
  uint32_t packed[kTile / 16][4];
  Running r;
  Profile profile;
  Ring ring{shared, is_arriving()};
  profile.start();
  walk_items(ring, raw, wg, [&](const Stretch& stretch) {
    const uint32_t queries = shared.query(stretch.slot, wg);
    const uint64_t query = descriptor_swizzle128(queries);
    start_softmax(r, p, stretch.piece->head);
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] = 0.0f;
    int tile = stretch.high;
    ring.wait(ring.tiles);
    ring.take_turn(wg);
    wgmma_fence();
    issue_scores(s, query, ring.key(ring.tiles));
    ring.pass_turn(wg);
    wgmma_wait<0>();
    settle(s);
    mask_edges(s, stretch, tile * kTile, p.window);
    raise_maxima(s, r, p);
    float sum[2];
    exponentiate(s, r.maximum, p, sum);
    r.sum[0] += sum[0];
    r.sum[1] += sum[1];
    pack_scores(s, packed);
    if ((tile + 1) * kTile > stretch.piece->length) {
      clear_values(ring.value(ring.tiles), stretch.piece->length - tile * kTile, kTile, wg);
    }
    profile.mark(kOutsideLoop);
    for (--tile; tile >= stretch.low; --tile) {
      ++ring.tiles;
      ring.wait(ring.tiles);
      profile.mark(kData);
      ring.take_turn(wg);
      profile.mark(kTurn);
      wgmma_fence();
      issue_scores(s, query, ring.key(ring.tiles));
      issue_output(o, packed, ring.value(ring.tiles - 1));
      ring.pass_turn(wg);
      wgmma_wait<1>();
      profile.mark(kScoresWait);
      settle(s);
      mask_edges(s, stretch, tile * kTile, p.window);
      take_trusting(s, o, r, p, [&] {
        score_again(s, queries, ring.key(ring.tiles));
        mask_edges(s, stretch, tile * kTile, p.window);
      });
      profile.mark(kSoftmax);
      wgmma_wait<0>();
      profile.mark(kOutputWait);
      // The packing stays below the wait: above, it would need registers beside those in flight.
      settle(o);
      settle_packed(packed);
      ring.release(ring.tiles - 1);
      settle(s);
      pack_scores(s, packed);
      profile.mark(kPack);
    }
    ring.signal(shared.query_empty(stretch.slot, wg));
    wgmma_fence();
    issue_output(o, packed, ring.value(ring.tiles));
    wgmma_wait<0>();
    settle(o);
    settle_packed(packed);
    ring.release(ring.tiles);
    ++ring.tiles;
    store_stretch(p, stretch, o, r);
  });
}

template <class>  // as attention_prefill_window
__global__ void __launch_bounds__(FullShared::kThreads, 1)
    attention_prefill_full(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_kv,
                           const __grid_constant__ Parameters p) {
  extern __shared__ uint8_t raw[];
  check_base(raw);
  const FullShared shared;
  BlockProfile profile;
  profile.start();
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map_q);
    tma_prefetch_map(&map_kv);
    for (int slot = 0; slot < kQuerySlots; ++slot) {
      for (int wg = 0; wg < kWarpgroups; ++wg) {
        mbarrier_init(shared.query_full(slot, wg), 1);
        mbarrier_init(shared.query_empty(slot, wg), 4 * kWarpArrivals);
      }
    }
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(shared.tile_full(stage), 1);
      mbarrier_init(shared.tile_empty(stage), 4 * kWarpgroups * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  const Cut cut = cut_of(p);
  count_tiles(p, Tables(shared.tables(raw), p.num_sequences),
              [&](int num_queries, int) { return num_items(num_queries, cut); });
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<32>();
    if (threadIdx.x < 32) produce(p, shared, raw, &map_q, &map_kv);
  } else {
    registers_grow<160>();
    consume(p, shared, raw, uniform(int(threadIdx.x) / 128 - 1));
  }
  profile.finish();
}
