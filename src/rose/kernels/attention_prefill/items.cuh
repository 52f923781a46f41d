// How prefill attention is cut into work items and in which order blocks take them. Plain index arithmetic, compiled
// for the host too: tests/kernels/attention_prefill/test_items.py runs this very code.
#pragma once

#include <cstdint>

namespace rose::attention_prefill {

constexpr int kRows = 64;  // query rows of a consumer warpgroup

// One head and up to `item_rows` query rows of one sequence. No rows: there is no more work.
struct __align__(16) Item {
  int sequence, head;
  int first_row;  // in q and out
  int num_rows;
  int position;   // of the first row, in its sequence
  int length;     // of the sequence
  int tile_low, tile_high;  // tiles of keys, both ends included
};
static_assert(sizeof(Item) == 32, "two 16-byte words");

// The sequences of a batch; tiles_before (tiles of queries in the sequences before) and starts have one entry more.
struct Tables {
  int *tiles_before, *starts, *lengths;
  __host__ __device__ Tables(int* memory, int num_sequences)
      : tiles_before(memory), starts(memory + num_sequences + 1), lengths(memory + 2 * num_sequences + 2) {}
};

__host__ __device__ inline int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ inline int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ inline int num_tiles(int num_queries, int item_rows) {
  return (num_queries + item_rows - 1) / item_rows;
}

// Blocks take items in rounds, each second round in reverse order, which evens out items of falling length.
struct Walk {
  int block, num_blocks;
  int round = 0;
  // Returns the next item of this block, or -1.
  __host__ __device__ int next(int num_items) {
    const int within = round & 1 ? num_blocks - 1 - block : block;
    const int item = round * num_blocks + within;
    ++round;
    return item < num_items ? item : -1;
  }
};

// Items are ordered by section of heads, then by sequence, from its end to its start (longest first), then by head:
// heads that share keys run together.
__host__ __device__ inline Item find_item(const Tables& tables, int num_sequences, int section_heads, int window,
                                          int item_rows, int tile_keys, int index) {
  const int per_section = tables.tiles_before[num_sequences] * section_heads;
  const int section = index / per_section;
  const int rest = index - section * per_section;
  const int tile = rest / section_heads;
  int low = 0, high = num_sequences;  // tiles_before[low] <= tile < tiles_before[high]
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (tables.tiles_before[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int row = (tables.tiles_before[low + 1] - 1 - tile) * item_rows;
  const int num_queries = tables.starts[low + 1] - tables.starts[low];
  Item item;
  item.sequence = low;
  item.head = section * section_heads + rest - tile * section_heads;
  item.length = tables.lengths[low];
  item.first_row = tables.starts[low] + row;
  item.num_rows = smaller(item_rows, num_queries - row);
  item.position = item.length - num_queries + row;
  item.tile_high = (item.position + item.num_rows - 1) / tile_keys;
  item.tile_low = larger(0, item.position - window + 1) / tile_keys;
  return item;
}

// What one warpgroup has of an item: the position of its first row and the tiles that some row of it sees; high is
// below low where the item ends before it.
struct Reach {
  int position, low, high;
};

__host__ __device__ inline Reach find_reach(const Item& item, int wg, int window, int tile_keys) {
  Reach reach;
  reach.position = item.position + wg * kRows;
  reach.low = item.tile_low;
  reach.high = item.tile_low - 1;
  if (wg * kRows < item.num_rows) {
    const int last = smaller(reach.position + kRows, item.position + item.num_rows) - 1;
    reach.low = larger(0, reach.position - window + 1) / tile_keys;
    reach.high = last / tile_keys;
  }
  return reach;
}

// Windowed layers: an item is one kv head and the positions 64 tile .. 64 tile + 63 of a sequence, of which the new
// ones are rows begin .. end - 1. With a window of at most 129 they see three tiles of 64 keys.
constexpr int kWindowTiles = 3;
constexpr int kWindowKeys = kWindowTiles * kRows;
constexpr int kMaxWindow = kWindowKeys - kRows + 1;

struct __align__(16) WindowItem {
  int sequence, group;
  int first_row;   // of row 0 in q and out; below the sequence's own, even below 0, where begin is not 0
  int begin, end;
  int first_key;   // position of key 0, a multiple of 64; below 0 near the start
  int length;      // of the sequence
  int seen_key;    // the lowest that any row sees
};
static_assert(sizeof(WindowItem) == 32, "two 16-byte words");

__host__ __device__ inline int num_window_tiles(int num_queries, int length) {
  return num_queries == 0 ? 0 : (length - 1) / kRows - (length - num_queries) / kRows + 1;
}

__host__ __device__ inline WindowItem find_window_item(const Tables& tables, int num_sequences, int num_groups,
                                                       int window, int index) {
  const int tile = index / num_groups;
  int low = 0, high = num_sequences;
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (tables.tiles_before[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int length = tables.lengths[low];
  const int first = length - (tables.starts[low + 1] - tables.starts[low]);  // position of the first new token
  const int position = (first / kRows + tile - tables.tiles_before[low]) * kRows;
  WindowItem item;
  item.sequence = low;
  item.group = index - tile * num_groups;
  item.first_row = tables.starts[low] + position - first;
  item.begin = larger(0, first - position);
  item.end = smaller(kRows, length - position);
  item.first_key = position + kRows - kWindowKeys;
  item.length = length;
  item.seen_key = larger(0, position + item.begin - window + 1);
  return item;
}

}  // namespace rose::attention_prefill
