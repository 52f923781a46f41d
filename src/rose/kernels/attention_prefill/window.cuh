// Windowed layers: everything a row sees is in shared memory at once, so that there is no running softmax. Part of
// kernel_sm90.cu.
//
// A block walks items (items.cuh): the keys and values of one kv head that 64 consecutive positions see, against all
// its query heads in turn. Three consumer warpgroups take the query heads round robin; a producer warp copies keys
// and values two items and queries two heads ahead.
#pragma once

struct WindowShared {
  static constexpr int kWarpgroups = 3;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kSlots = 2;  // items whose keys and values are held; heads whose queries are, per warpgroup
  static constexpr int kSideBytes = kWindowKeys * kRowBytes;  // keys or values of an item
  static constexpr uint32_t kQueries = kSlots * 2 * kSideBytes;
  static constexpr uint32_t kBarriers = kQueries + kSlots * kWarpgroups * kBoxBytes;
  static constexpr int kNumBarriers = 2 * kSlots * (1 + kWarpgroups);
  static constexpr uint32_t kItems = kBarriers + 8 * kNumBarriers;
  static constexpr uint32_t kTables = kItems + kSlots * 32;
  static int bytes(int num_sequences) { return 1024 + kTables + 4 * 3 * (num_sequences + 1); }

  static constexpr uint32_t base = kBase;
  __device__ uint32_t keys(int slot) const { return base + slot * 2 * kSideBytes; }
  __device__ uint32_t values(int slot) const { return keys(slot) + kSideBytes; }
  __device__ uint32_t query(int wg, int slot) const { return base + kQueries + (wg * kSlots + slot) * kBoxBytes; }
  __device__ uint32_t item_full(int slot) const { return base + kBarriers + 8 * slot; }
  __device__ uint32_t item_empty(int slot) const { return item_full(slot) + 8 * kSlots; }
  __device__ uint32_t query_full(int wg, int slot) const {
    return base + kBarriers + 8 * (2 * kSlots + wg * kSlots + slot);
  }
  __device__ uint32_t query_empty(int wg, int slot) const { return query_full(wg, slot) + 8 * kSlots * kWarpgroups; }
  __device__ WindowItem* item(uint8_t* raw, int slot) const {
    return reinterpret_cast<WindowItem*>(raw + (base - shared_address(raw)) + kItems) + slot;
  }
  __device__ int* tables(uint8_t* raw) const {
    return reinterpret_cast<int*>(raw + (base - shared_address(raw)) + kTables);
  }
};

__device__ void produce_window(const Parameters& p, const WindowShared& shared, uint8_t* raw, const CUtensorMap* map_q,
                               const CUtensorMap* map_kv) {
  const int lane = threadIdx.x & 31;
  const Tables tables(shared.tables(raw), p.num_sequences);
  const int num_items = tables.tiles_before[p.num_sequences] * p.num_groups;
  const int heads_per_group = p.num_heads / p.num_groups;
  Cursor<WindowShared::kSlots> place, turn;  // turn: of one warpgroup's queries; all advance together
  int wg = 0;
  for (int index = blockIdx.x; index < num_items; index += gridDim.x, place.advance()) {
    const WindowItem item = find_window_item(tables, p.num_sequences, p.num_groups, p.window, index);
    // Lanes 0..2 copy keys, 3..5 values. Row -64 is outside the tensor and reads as zeros.
    int row = -kRows;
    if (lane < 2 * kWindowTiles) {
      const int token = item.first_key + lane % kWindowTiles * kRows;
      if (token + kRows > item.seen_key && token < item.length) {
        const int column = token / p.page_tokens;
        const int page = p.page_table[int64_t(item.sequence) * p.page_stride + column];
        const int side = lane / kWindowTiles;
        if (page >= 0) {
          row = ((page * 2 + side) * p.num_groups + item.group) * p.page_tokens + token - column * p.page_tokens;
        }
      }
    }
    mbarrier_wait(shared.item_empty(place.stage), place.parity ^ 1);
    if (lane == 0) {
      *shared.item(raw, place.stage) = item;
      mbarrier_arrive_expect(shared.item_full(place.stage), 2 * WindowShared::kSideBytes);
    }
    __syncwarp();
    if (lane < 2 * kWindowTiles) {
      tma_load_2d(shared.keys(place.stage) + lane * kBoxBytes, map_kv, shared.item_full(place.stage), 0, row);
    }
    for (int head = 0; head < heads_per_group; ++head) {
      mbarrier_wait(shared.query_empty(wg, turn.stage), turn.parity ^ 1);
      if (lane == 0) {
        const uint32_t full = shared.query_full(wg, turn.stage);
        mbarrier_arrive_expect(full, kBoxBytes);
        tma_load_3d(shared.query(wg, turn.stage), map_q, full, 0, item.group * heads_per_group + head, item.first_row);
      }
      __syncwarp();
      if (++wg == WindowShared::kWarpgroups) {
        wg = 0;
        turn.advance();
      }
    }
  }
  // Stay until every item is consumed, so that a stuck consumer meets the watchdog here.
  for (int i = 0; i < WindowShared::kSlots; ++i, place.advance()) {
    mbarrier_wait(shared.item_empty(place.stage), place.parity ^ 1);
  }
}

// Softmax of one row's 192 raw scores in one go; returns the sums of this thread's columns, the sink in one of four.
// `warp`: rows 16 warp .. 16 warp + 15 of the item see, at most, the 16-column steps warp .. warp + 8.
__device__ __forceinline__ void window_softmax(float (&s)[kWindowKeys / 2], uint32_t (&packed)[kWindowKeys / 16][4],
                                               float (&sum)[2], const WindowItem& item, const Parameters& p,
                                               float sink, int warp) {
  constexpr int kSteps = kWindowKeys / 16;
  const int lane = threadIdx.x & 31, row = 16 * warp + lane / 4, first = 2 * (lane & 3);
  auto is_hidden = [&](int step) { return step < warp || step > warp + 8; };
  // Row r sees columns (r + 128 - window, r + 128] of position first_key and on.
  if (p.window == kMaxWindow - 1 && item.first_key >= 0) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step >= 4 && step < 8) continue;
      if (step < 4 ? step > warp : step < warp + 8) continue;
      const int edge = row + (step < 4 ? 0 : 128) - 16 * step - first;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = 8 * (i >> 2) + (i & 1) - 8 * (i >> 1 & 1);
        if (step < 4 ? column <= edge : column > edge) s[8 * step + i] = -INFINITY;
      }
    }
  } else {
    const int start = -1 - item.first_key;  // positions below zero
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = 16 * step + 8 * (i >> 2) + (i & 1) + first, of = row + 8 * (i >> 1 & 1);
        if (column <= of + 128 - p.window || column <= start || column > of + 128) s[8 * step + i] = -INFINITY;
      }
    }
  }
  float maximum[2] = {fmaxf(sink, kLowest), fmaxf(sink, kLowest)};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if ((step < 3 || step > 8) && is_hidden(step)) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) maximum[i >> 1 & 1] = fmaxf(maximum[i >> 1 & 1], s[8 * step + i]);
  }
  share_tops(maximum);
  float offset[2], more[2] = {0.0f, 0.0f};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    offset[h] = -maximum[h] * p.scale_log2;
    sum[h] = (lane & 3) == 0 ? exp2_mufu(fmaf(sink, p.scale_log2, offset[h])) : 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if ((step < 3 || step > 8) && is_hidden(step)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[step][i] = 0;
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i & 1;
      const float low = exp2_mufu(fmaf(s[8 * step + 2 * i], p.scale_log2, offset[h]));
      const float high = exp2_mufu(fmaf(s[8 * step + 2 * i + 1], p.scale_log2, offset[h]));
      sum[h] += low;
      more[h] += high;
      packed[step][i] = pack_bf16(low, high);
    }
  }
  sum[0] += more[0];
  sum[1] += more[1];
}

__device__ __forceinline__ void consume_window(const Parameters& p, const WindowShared& shared, uint8_t* raw,
                                               const int wg) {
  const bool is_signaller = (threadIdx.x & 31) == 0;
  const int warp = uniform((threadIdx.x >> 5) & 3);
  const Tables tables(shared.tables(raw), p.num_sequences);
  const int num_items = tables.tiles_before[p.num_sequences] * p.num_groups;
  const int heads_per_group = p.num_heads / p.num_groups;
  Cursor<WindowShared::kSlots> place, turn;
  int head = wg;  // of the item, this warpgroup's next
  for (int index = blockIdx.x; index < num_items; index += gridDim.x, place.advance()) {
    mbarrier_wait(shared.item_full(place.stage), place.parity);
    const WindowItem& item = *shared.item(raw, place.stage);
    const uint64_t key = descriptor_swizzle128(shared.keys(place.stage));
    const uint64_t value = descriptor_swizzle128(shared.values(place.stage));
    const int num_keys = item.length - item.first_key;
    if (num_keys < kWindowKeys) clear_values(shared.values(place.stage), num_keys, kWindowKeys, wg);
    for (; head < heads_per_group; head += WindowShared::kWarpgroups, turn.advance()) {
      const int query_head = item.group * heads_per_group + head;
      const float sink = p.sinks[query_head] * p.inverse_scale;
      float s[kWindowKeys / 2], sum[2], o[32];
      uint32_t packed[kWindowKeys / 16][4];
      mbarrier_wait(shared.query_full(wg, turn.stage), turn.parity);
      const uint64_t query = descriptor_swizzle128(shared.query(wg, turn.stage));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        wgmma_bf16<kWindowKeys>(s, advance(query, 32 * k), advance(key, 32 * k), k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      settle(s);
      if (is_signaller) mbarrier_arrive(shared.query_empty(wg, turn.stage));
      window_softmax(s, packed, sum, item, p, sink, warp);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kWindowKeys / 16; ++k) {
        wgmma_bf16_mn<kHeadDim>(o, packed[k], advance(value, 16 * kRowBytes * k), k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      settle(o);
      __nv_bfloat16* out = p.out + (int64_t(item.first_row) * p.num_heads + query_head) * kHeadDim;
      store_output(out, p.num_heads * kHeadDim, o, sum, 16 * warp + (threadIdx.x & 31) / 4, item.begin, item.end);
    }
    head -= heads_per_group;
    __syncwarp();
    if (is_signaller) mbarrier_arrive(shared.item_empty(place.stage));
  }
}

template <class>  // a template only so that it is not compiled where nothing launches it
__global__ void __launch_bounds__(WindowShared::kThreads, 1)
    attention_prefill_window(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_kv,
                             const __grid_constant__ Parameters p) {
  extern __shared__ uint8_t raw[];
  check_base(raw);
  const WindowShared shared;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map_q);
    tma_prefetch_map(&map_kv);
    for (int slot = 0; slot < WindowShared::kSlots; ++slot) {
      mbarrier_init(shared.item_full(slot), 1);
      mbarrier_init(shared.item_empty(slot), 4 * WindowShared::kWarpgroups);  // one arrival per warp
      for (int wg = 0; wg < WindowShared::kWarpgroups; ++wg) {
        mbarrier_init(shared.query_full(wg, slot), 1);
        mbarrier_init(shared.query_empty(wg, slot), 4);
      }
    }
    mbarrier_init_fence();
  }
  count_tiles(p, Tables(shared.tables(raw), p.num_sequences), [](int num_queries, int length) {
    return num_window_tiles(num_queries, length);
  });
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<32>();
    if (threadIdx.x < 32) produce_window(p, shared, raw, &map_q, &map_kv);
  } else {
    registers_grow<160>();
    consume_window(p, shared, raw, uniform(int(threadIdx.x) / 128 - 1));
  }
}
