// Layers without a window, or with a wide one: a running softmax without maxima. Part of kernel_sm90.cu.
//
// A probability is rounded to bf16, which has the exponents of float32: what it is relative to decides its accuracy
// only where it leaves their range. So the maximum of a row's first tile stays until a tile's sums say that some score
// lies far above it; that tile's scores are made again, warp by warp, and the maximum is raised. Exponentials then
// need nothing but their own score.
#pragma once

#include "full_fill.cuh"
#include "full_softmax.cuh"

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

// Mask scores of kTile columns from `column` on, where some row must not see all of them.
__device__ __forceinline__ void mask_edges(float (&s)[kScores], const Stretch& stretch, int column, int window) {
  if (column + kTile - 1 > stretch.position || column <= stretch.position + kRows - 1 - window) {
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (threadIdx.x & 31) / 4;
    const int last = stretch.position + row - column - 2 * int(threadIdx.x & 3);
    mask_scores(s, {last, last + 8}, window);
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
