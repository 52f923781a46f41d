// How prefill attention is cut into work items and in which order blocks take them. Plain index arithmetic, compiled
// for the host too: tests/kernels/attention_prefill/test_items.py runs this very code.
#pragma once

#include <cstdint>

namespace rose::attention_prefill {

constexpr int kRows = 64;  // query rows of a consumer warpgroup

// Pieces of 64 query rows of one sequence, taken from the heads of one kv head: pieces are numbered by row and, within
// 64 rows, by head; an item has those from `last_piece` downwards, one for each warpgroup. So all of them see the same
// tiles of keys but for one.
struct Item {
  int sequence, group;
  int first_row, num_rows;  // of the sequence, in q and out
  int length;               // of the sequence
  int last_piece;
  int position;             // of the earliest row, in the sequence
  int tile_low, tile_high;  // tiles of keys, both ends included
};

// What one warpgroup has of an item.
struct Piece {
  int head;
  int first_row, num_rows;  // in q and out; without rows, tiles pass by unread
  int position, length;     // of the first row in its sequence; of that
  int low, high;            // tiles that some row sees; high is below low without rows
  int tile_low, tile_high;  // of the item; tile_high is below 0 where there is no more work
};

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

// How items are cut. Sections: so many kv heads are walked together, so that their keys and values stay in L2.
struct Cut {
  int warpgroups, tile_keys, window;
  int section_groups, heads_per_group;
};

__host__ __device__ inline int find_sequence(const Tables& tables, int num_sequences, int tile) {
  int low = 0, high = num_sequences;  // tiles_before[low] <= tile < tiles_before[high]
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (tables.tiles_before[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__host__ __device__ inline int num_items(int num_queries, const Cut& cut) {
  return num_tiles(num_tiles(num_queries, kRows) * cut.heads_per_group, cut.warpgroups);
}

// Items are ordered by section, then by sequence, from its end to its start (longest first), then by kv head.
__host__ __device__ inline Item find_item(const Tables& tables, int num_sequences, const Cut& cut, int index) {
  const int per_section = tables.tiles_before[num_sequences] * cut.section_groups;
  const int section = index / per_section;
  const int rest = index - section * per_section;
  const int tile = rest / cut.section_groups;
  const int s = find_sequence(tables, num_sequences, tile);
  Item item;
  item.sequence = s;
  item.group = section * cut.section_groups + rest - tile * cut.section_groups;
  item.first_row = tables.starts[s];
  item.num_rows = tables.starts[s + 1] - tables.starts[s];
  item.length = tables.lengths[s];
  item.last_piece = num_tiles(item.num_rows, kRows) * cut.heads_per_group - 1 -
                    (tile - tables.tiles_before[s]) * cut.warpgroups;
  const int begin = item.length - item.num_rows;
  const int last_row = smaller((item.last_piece / cut.heads_per_group + 1) * kRows, item.num_rows) - 1;
  item.position = begin + larger(0, item.last_piece - cut.warpgroups + 1) / cut.heads_per_group * kRows;
  item.tile_high = (begin + last_row) / cut.tile_keys;
  item.tile_low = larger(0, item.position - cut.window + 1) / cut.tile_keys;
  return item;
}

__host__ __device__ inline Piece find_piece(const Item& item, const Cut& cut, int wg) {
  const int number = larger(0, item.last_piece - wg), tile = number / cut.heads_per_group, row = tile * kRows;
  Piece piece;
  piece.head = item.group * cut.heads_per_group + number - tile * cut.heads_per_group;
  piece.first_row = item.first_row + row;
  piece.num_rows = item.last_piece < wg ? 0 : smaller(kRows, item.num_rows - row);
  piece.position = item.length - item.num_rows + row;
  piece.length = item.length;
  piece.low = piece.tile_low = item.tile_low;
  piece.high = piece.low - 1;
  piece.tile_high = item.tile_high;
  if (piece.num_rows > 0) {
    piece.low = larger(0, piece.position - cut.window + 1) / cut.tile_keys;
    piece.high = (piece.position + piece.num_rows - 1) / cut.tile_keys;
  }
  return piece;
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
  const int s = find_sequence(tables, num_sequences, tile);
  const int length = tables.lengths[s];
  const int first = length - (tables.starts[s + 1] - tables.starts[s]);  // position of the first new token
  const int position = (first / kRows + tile - tables.tiles_before[s]) * kRows;
  WindowItem item;
  item.sequence = s;
  item.group = index - tile * num_groups;
  item.first_row = tables.starts[s] + position - first;
  item.begin = larger(0, first - position);
  item.end = smaller(kRows, length - position);
  item.first_key = position + kRows - kWindowKeys;
  item.length = length;
  item.seen_key = larger(0, position + item.begin - window + 1);
  return item;
}

}  // namespace rose::attention_prefill
