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

// What may vary; every combination computes the same thing.
struct Options {
  int tile;      // keys of a tile; keys and values of one share a barrier
  int stages;    // tiles of keys, and of values, in shared memory
  bool ahead;    // two tiles of scores; otherwise one, and warpgroups take turns at issuing products
  bool grouped;  // an item's rows come from several heads: GroupedItem
};

// By number; VARIANTS in cuda_impl.py has the words. Compiled are those whose bit is set in ROSE_VARIANTS.
constexpr int kFirstVariant = 36;
constexpr Options kVariants[] = {
    {128, 4, false, false},  // 36
    {},                      // 37: gone
    {128, 4, false, true},   // 38
    {64, 8, true, true},     // 39
};

template <int kVariant>
struct Config {
  static constexpr Options kOptions = kVariants[kVariant - kFirstVariant];
  static constexpr int kWarpgroups = 3;  // consumers
  static constexpr int kTile = kOptions.tile;
  static constexpr int kStages = kOptions.stages;
  static constexpr bool kAhead = kOptions.ahead;
  static constexpr bool kTurns = !kAhead;
  static constexpr bool kGrouped = kOptions.grouped;
  static_assert((kStages & (kStages - 1)) == 0, "places in the ring are low bits of a count");

  static constexpr int kScores = kTile / 2;  // of a tile, in one thread
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kBoxes = kTile / kRows;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kQueryBytes = kQuerySlots * kWarpgroups * kBoxBytes;
  static constexpr int kNumBarriers = 4 * kWarpgroups + 2 * kStages;
  // Registers: 65536 / kThreads at launch, then producers hand theirs to consumers.
  static constexpr int kConsumerRegisters = 160;
  static constexpr int kProducerRegisters = 32;

  static int shared_bytes(int num_sequences) {
    return 1024 + kQueryBytes + 2 * kStages * kTileBytes + 8 * kNumBarriers +
           kItemSlots * kWarpgroups * int(sizeof(Piece)) + 4 * 3 * (num_sequences + 1);
  }
};

// What is the same in all lanes of a warp, so that the compiler knows it: control that hangs on it needs no
// reconvergence, and addresses live in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

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

template <class C>
__device__ void produce_streamed(const Parameters& p, const Shared<C>& shared, uint8_t* raw, const CUtensorMap* map_q,
                                 const CUtensorMap* map_kv) {
  const int lane = threadIdx.x & 31;
  const Tables tables(shared.tables(raw), p.num_sequences);
  const Cut cut = cut_of<C>(p);
  const int value_step = p.num_groups * p.page_tokens;
  Place<C::kStages> place;
  Place<kQuerySlots> slot;
  Walk walk{int(blockIdx.x), int(gridDim.x)};
  for (int count = 0;; ++count, slot.advance()) {
    const int index = walk.next(num_items<C>(p, tables));
    ItemOf<C> item;
    if (index >= 0) find_item(tables, p.num_sequences, cut, index, item);
    hand_out<C>(item, index, cut, shared, raw, map_q, count, slot);
    if (index < 0) break;
    // Each lane looks one box of 64 keys up, newest first, 32 ahead of those in hand. Pages that hold no token of any
    // row's reach are not looked up: row -64 is outside the tensor and reads as zeros, which a probability of zero
    // cannot turn into NaN.
    const int* table = p.page_table + int64_t(item.sequence) * p.page_stride;
    const int first_page = max(0, item.position - p.window + 1) / p.page_tokens;
    const int end_page = (item.length + p.page_tokens - 1) / p.page_tokens;
    const int newest = (item.tile_high + 1) * C::kBoxes - 1;
    const int num_boxes = __shfl_sync(~0u, (item.tile_high - item.tile_low + 1) * C::kBoxes, 0);
    auto find_row = [&](int box) {
      const int token = box * kRows, column = token / p.page_tokens;
      const bool is_held = box >= 0 && column >= first_page && column < end_page;
      const int page = is_held ? table[column] : -1;
      return page < 0 ? -kRows : (page * 2 * p.num_groups + item.group) * p.page_tokens + token - column * p.page_tokens;
    };
    int row_ahead = find_row(newest - lane), rows = 0;
    for (int box = 0; box < num_boxes; box += C::kBoxes, place.advance()) {
      if (box % 32 == 0) {
        rows = row_ahead;
        row_ahead = find_row(newest - lane - box - 32);
      }
      mbarrier_wait(shared.tile_empty(place.stage), place.parity ^ 1);
      const uint32_t full = shared.tile_full(place.stage);
      if (lane == 0) mbarrier_arrive_expect(full, 2 * C::kTileBytes);
#pragma unroll
      for (int i = 0; i < C::kBoxes; ++i) {
        const int row = __shfl_sync(~0u, __shfl_sync(~0u, rows, (box + i) % 32), 0);
        const int at = (C::kBoxes - 1 - i) * kBoxBytes;
        if (lane == 0) {
          tma_load_2d(shared.key(place.stage) + at, map_kv, full, 0, row);
          tma_load_2d(shared.value(place.stage) + at, map_kv, full, 0, row < 0 ? row : row + value_step);
        }
      }
      __syncwarp();
    }
  }
  // Stay until every tile is consumed, so that a stuck consumer meets the watchdog here.
  for (int i = 0; i < C::kStages; ++i, place.advance()) mbarrier_wait(shared.tile_empty(place.stage), place.parity ^ 1);
}

// ---- consumers ------------------------------------------------------------------------------------------------

// Whether this lane arrives for its warp: mbarrier_arrive_warp, the lane known beforehand.
__device__ __forceinline__ bool is_arriving() { return kWarpArrivals > 1 || (threadIdx.x & 31) == 0; }

// The ring of tiles as a consumer warp sees it; `tiles` is what it counts by.
template <class C>
struct StreamRing {
  const Shared<C>& shared;
  const bool is_signaller;
  unsigned tiles = 0;

  __device__ uint32_t key(unsigned n) const { return shared.key(n % C::kStages); }
  __device__ uint32_t value(unsigned n) const { return shared.value(n % C::kStages); }
  __device__ void wait(unsigned n) const { mbarrier_wait(shared.tile_full(n % C::kStages), n / C::kStages & 1); }
  __device__ void signal(uint32_t barrier) const {
    if (is_signaller) mbarrier_arrive(barrier);
  }
  __device__ void release(unsigned n) const { signal(shared.tile_empty(n % C::kStages)); }
  // Turns: barrier 1 + i opens warpgroup i, once per tile of an item, also where it has nothing to compute.
  __device__ void take_turn(int wg) const {
    if constexpr (C::kTurns) named_sync(1 + wg, 256);
  }
  __device__ void pass_turn(int wg) const {
    if constexpr (C::kTurns) named_arrive(wg == C::kWarpgroups - 1 ? 1 : 2 + wg, 256);
  }
  __device__ void skip(int more, int wg) {
    for (; more > 0; --more, ++tiles) {
      take_turn(wg);
      pass_turn(wg);
      wait_together(shared.tile_full(tiles % C::kStages), tiles / C::kStages & 1);
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
template <class C, class Attend>
__device__ __forceinline__ void walk_items(const Parameters& p, StreamRing<C>& ring, uint8_t* raw, int wg,
                                           Attend attend) {
  const Shared<C>& shared = ring.shared;
  if (C::kTurns && wg == C::kWarpgroups - 1) named_arrive(1, 256);
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

// Mask scores of C::kTile columns from `column` on, where some row must not see all of them.
template <class C>
__device__ __forceinline__ void mask_edges(float (&s)[C::kScores], const Stretch& stretch, int column, int window) {
  if (column + C::kTile - 1 > stretch.position || column <= stretch.position + kRows - 1 - window) {
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (threadIdx.x & 31) / 4;
    const int last = stretch.position + row - column - 2 * int(threadIdx.x & 3);
    mask_scores<C>(s, {last, last + 8}, window);
  }
}

// Raise the maxima to what scores demand; sums follow, r.factor is for the output.
template <class C>
__device__ __forceinline__ void raise_maxima(const float (&s)[C::kScores], Running& r, const Parameters& p) {
  float top[2];
  find_tops<C>(s, r.maximum, top);
  share_tops(top);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    r.factor[h] = exp2_mufu((r.maximum[h] - top[h]) * p.scale_log2);
    r.maximum[h] = top[h];
    r.sum[h] *= r.factor[h];
  }
}

// The scores of one warp's rows, without its warpgroup.
template <class C>
__device__ __forceinline__ void score_again(float (&s)[C::kScores], uint32_t queries, uint32_t keys) {
  const int lane = threadIdx.x & 31, key = (lane >> 4) * 8 + (lane & 7), half = lane >> 3 & 1;
  const int row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
#pragma unroll
  for (int i = 0; i < C::kScores; ++i) s[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    uint32_t a[4];  // elements 16k to 16k + 15 of this warp's rows
    load_matrices(a, queries + row * kRowBytes + (((2 * k + (lane >> 4)) ^ (row & 7)) << 4));
#pragma unroll
    for (int j = 0; j < C::kTile / 8; j += 2) {
      uint32_t b[4];
      load_matrices(b, keys + (8 * j + key) * kRowBytes + (((2 * k + half) ^ (key & 7)) << 4));
      multiply_bf16(s + 4 * j, a, b[0], b[1]);
      multiply_bf16(s + 4 * j + 4, a, b[2], b[3]);
    }
  }
}

// Scores become probabilities; redo(s) makes the scores again where the maxima have to be raised. Products on `o` may be
// in flight, others' results are not touched.
template <class C, class Redo>
__device__ __forceinline__ void take_trusting(float (&s)[C::kScores], float (&o)[32], Running& r, const Parameters& p,
                                              Redo redo) {
  float sum[2];
  exponentiate<C>(s, r.maximum, p, sum);
  // Also where a sum is infinite. Besides, no wait after this branch is moved above the exponentials.
  if (__builtin_expect(__any_sync(~0u, !(sum[0] + sum[1] < kTrustedSum)), 0)) {
    redo();
    raise_maxima<C>(s, r, p);
    exponentiate<C>(s, r.maximum, p, sum);
    wgmma_wait<0>();
    settle(o);
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] *= r.factor[(i >> 1) & 1];
  }
  r.sum[0] += sum[0];
  r.sum[1] += sum[1];
}

template <int kScores, int kSteps>
__device__ __forceinline__ void pack_scores(const float (&s)[kScores], uint32_t (&packed)[kSteps][4]) {
  static_assert(kScores == 8 * kSteps);
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) packed[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

template <int kSteps>
__device__ __forceinline__ void settle_packed(uint32_t (&packed)[kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) settle(packed[k]);
}

// Divide by the sums and write the rows of a stretch.
__device__ __forceinline__ void store_stretch(const Parameters& p, const Stretch& stretch, const float (&o)[32],
                                              const Running& r) {
  const Piece* piece = stretch.piece;
  const int row = ((threadIdx.x >> 5) & 3) * 16 + (threadIdx.x & 31) / 4;
  __nv_bfloat16* out = p.out + (int64_t(piece->first_row) * p.num_heads + piece->head) * kHeadDim;
  store_output(out, p.num_heads * kHeadDim, o, r.sum, row, 0, piece->num_rows);
}

// Two tiles of scores: those in hand and those that the tensor cores make meanwhile.
template <class C>
__device__ __forceinline__ void consume_ahead(const Parameters& p, const Shared<C>& shared, uint8_t* raw,
                                                 const int wg) {
  // HAZARD: registers. A thread has 160, of which the arrays take 128; so little else is kept across the loop over
  // tiles, and the rest is read again from the piece.
  constexpr std::integral_constant<int, 0> kFirst;
  constexpr std::integral_constant<int, 1> kSecond;
  float s[2][C::kScores], o[32];
  uint32_t packed[C::kTile / 16][4];
  Running r;
  Profile profile;
  StreamRing<C> ring{shared, is_arriving()};  // counts up to the tile whose exponentials are due
  profile.start();
  walk_items<C>(p, ring, raw, wg, [&](const Stretch& stretch) {
    const int high = stretch.high, low = stretch.low;
    const uint32_t queries = shared.query(stretch.slot, wg);
    const uint64_t query = descriptor_swizzle128(queries);
    auto take = [&](auto buffer, int tile) {
      constexpr int kBuffer = decltype(buffer)::value;
      settle(s[kBuffer]);
      mask_edges<C>(s[kBuffer], stretch, tile * C::kTile, p.window);
      take_trusting<C>(s[kBuffer], o, r, p, [&] {
        score_again<C>(s[kBuffer], queries, ring.key(ring.tiles));
        mask_edges<C>(s[kBuffer], stretch, tile * C::kTile, p.window);
      });
    };
    // After a wait: the output of the tile before is there.
    auto finish_output = [&](auto buffer) {
      constexpr int kBuffer = decltype(buffer)::value;
      settle(o);
      settle_packed(packed);
      ring.release(ring.tiles - 1);
      settle(s[kBuffer]);
      pack_scores(s[kBuffer], packed);
    };
    start_softmax(r, p, stretch.piece->head);
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] = 0.0f;

    // First tile; the scores of the second beside it (of the first again where there is none: no branch between
    // products).
    const unsigned second = ring.tiles + (high > low ? 1 : 0);
    ring.wait(ring.tiles);
    ring.wait(second);
    wgmma_fence();
    issue_scores<C>(s[0], query, ring.key(ring.tiles));
    issue_scores<C>(s[1], query, ring.key(second));
    wgmma_wait<1>();
    settle(s[0]);
    mask_edges<C>(s[0], stretch, high * C::kTile, p.window);
    raise_maxima<C>(s[0], r, p);
    float sum[2];
    exponentiate<C>(s[0], r.maximum, p, sum);
    r.sum[0] += sum[0];
    r.sum[1] += sum[1];
    pack_scores(s[0], packed);
    if ((high + 1) * C::kTile > stretch.piece->length) {
      clear_values(ring.value(ring.tiles), stretch.piece->length - high * C::kTile, C::kTile, wg);
    }
    ++ring.tiles;
    profile.mark(kOutsideLoop);

    // The tile in `buffer`, and there is one after it.
    auto step = [&](auto buffer, int tile) {
      constexpr int kBuffer = decltype(buffer)::value;
      ring.wait(ring.tiles + 1);
      profile.mark(kData);
      wgmma_fence();
      issue_output<C>(o, packed, ring.value(ring.tiles - 1));
      issue_scores<C>(s[1 - kBuffer], query, ring.key(ring.tiles + 1));
      wgmma_wait<2>();
      profile.mark(kScoresWait);
      take(buffer, tile);
      profile.mark(kSoftmax);
      wgmma_wait<1>();
      profile.mark(kOutputWait);
      finish_output(buffer);
      ++ring.tiles;
      profile.mark(kPack);
    };
    // The oldest tile, in `buffer` unless it was the first, and what is left of the output. No branch between products.
    auto finish = [&](auto buffer, int tile) {
      auto last = [&] {
        ring.signal(shared.query_empty(stretch.slot, wg));
        wgmma_fence();
        issue_output<C>(o, packed, ring.value(ring.tiles - 1));
        wgmma_wait<0>();
        settle(o);
        settle_packed(packed);
        ring.release(ring.tiles - 1);
      };
      if (tile < low) {
        last();
        return;
      }
      wgmma_fence();
      issue_output<C>(o, packed, ring.value(ring.tiles - 1));
      wgmma_wait<1>();
      take(buffer, tile);
      wgmma_wait<0>();
      finish_output(buffer);
      ++ring.tiles;
      last();
    };
    int tile = high - 1;
    for (; tile > low + 1; tile -= 2) {
      step(kSecond, tile);
      step(kFirst, tile - 1);
    }
    if (tile > low) {
      step(kSecond, tile);
      finish(kFirst, tile - 1);
    } else {
      finish(kSecond, tile);
    }
    store_stretch(p, stretch, o, r);
  });
}

// One tile of scores; warpgroups take turns at issuing products, and the output of a tile is made beside the exponentials
// of the next.
template <class C>
__device__ __forceinline__ void consume_in_turn(const Parameters& p, const Shared<C>& shared, uint8_t* raw,
                                                const int wg) {
  // HAZARD: registers, as above.
  float s[C::kScores], o[32];
  uint32_t packed[C::kTile / 16][4];
  Running r;
  Profile profile;
  StreamRing<C> ring{shared, is_arriving()};
  profile.start();
  walk_items<C>(p, ring, raw, wg, [&](const Stretch& stretch) {
    const uint32_t queries = shared.query(stretch.slot, wg);
    const uint64_t query = descriptor_swizzle128(queries);
    start_softmax(r, p, stretch.piece->head);
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] = 0.0f;
    int tile = stretch.high;
    ring.wait(ring.tiles);
    ring.take_turn(wg);
    wgmma_fence();
    issue_scores<C>(s, query, ring.key(ring.tiles));
    ring.pass_turn(wg);
    wgmma_wait<0>();
    settle(s);
    mask_edges<C>(s, stretch, tile * C::kTile, p.window);
    raise_maxima<C>(s, r, p);
    float sum[2];
    exponentiate<C>(s, r.maximum, p, sum);
    r.sum[0] += sum[0];
    r.sum[1] += sum[1];
    pack_scores(s, packed);
    if ((tile + 1) * C::kTile > stretch.piece->length) {
      clear_values(ring.value(ring.tiles), stretch.piece->length - tile * C::kTile, C::kTile, wg);
    }
    profile.mark(kOutsideLoop);
    for (--tile; tile >= stretch.low; --tile) {
      ++ring.tiles;
      ring.wait(ring.tiles);
      profile.mark(kData);
      ring.take_turn(wg);
      profile.mark(kTurn);
      wgmma_fence();
      issue_scores<C>(s, query, ring.key(ring.tiles));
      issue_output<C>(o, packed, ring.value(ring.tiles - 1));
      ring.pass_turn(wg);
      wgmma_wait<1>();
      profile.mark(kScoresWait);
      settle(s);
      mask_edges<C>(s, stretch, tile * C::kTile, p.window);
      take_trusting<C>(s, o, r, p, [&] {
        score_again<C>(s, queries, ring.key(ring.tiles));
        mask_edges<C>(s, stretch, tile * C::kTile, p.window);
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
    issue_output<C>(o, packed, ring.value(ring.tiles));
    wgmma_wait<0>();
    settle(o);
    settle_packed(packed);
    ring.release(ring.tiles);
    ++ring.tiles;
    store_stretch(p, stretch, o, r);
  });
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
        mbarrier_init(shared.query_empty(slot, wg), 4 * kWarpArrivals);
      }
    }
    for (int stage = 0; stage < C::kStages; ++stage) {
      mbarrier_init(shared.tile_full(stage), 1);
      mbarrier_init(shared.tile_empty(stage), 4 * C::kWarpgroups * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  count_items<C>(p, Tables(shared.tables(raw), p.num_sequences));
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<C::kProducerRegisters>();
    if (threadIdx.x < 32) produce_streamed<C>(p, shared, raw, &map_q, &map_kv);
  } else {
    registers_grow<C::kConsumerRegisters>();
    const int wg = uniform(int(threadIdx.x) / 128 - 1);
    if constexpr (C::kAhead) {
      consume_ahead<C>(p, shared, raw, wg);
    } else {
      consume_in_turn<C>(p, shared, raw, wg);
    }
  }
  profile.finish();
}
