// Sizes and shared memory of full.cuh, whose part this is, and the warp that fills it: the same in all its lanes but for
// the look-up of pages.
#pragma once

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
