// Plain C++ of the CUDA kernel (items.cuh, kept.cuh), compiled for the host and called by test_items.py.
#define __host__
#define __device__
#define __align__(n) alignas(n)
#include "items.cuh"
#include "kept.cuh"

#include <vector>

using namespace rose::attention_prefill;

// Tables over `memory`; count(new tokens, length) gives the tiles of a sequence.
template <class Count>
Tables fill_tables(std::vector<int>& memory, int num_sequences, const int* starts, const int* lengths, Count count) {
  memory.resize(3 * (num_sequences + 1));
  Tables tables(memory.data(), num_sequences);
  for (int s = 0; s < num_sequences; ++s) {
    tables.tiles_before[s + 1] = tables.tiles_before[s] + count(starts[s + 1] - starts[s], lengths[s]);
    tables.starts[s + 1] = starts[s + 1];
    tables.lengths[s] = lengths[s];
  }
  return tables;
}

// Write the items of one block, in its order: each as it is, then its pieces; return how many.
extern "C" int list_items(int num_sequences, const int* starts, const int* lengths, int num_groups,
                          const int* cut_words, int block, int num_blocks, int* out) {
  const Cut& cut = *reinterpret_cast<const Cut*>(cut_words);
  std::vector<int> memory;
  const Tables tables = fill_tables(memory, num_sequences, starts, lengths,
                                    [&](int num_queries, int) { return num_items(num_queries, cut); });
  Walk walk{block, num_blocks};
  int count = 0;
  for (int index; (index = walk.next(tables.tiles_before[num_sequences] * num_groups)) >= 0; ++count) {
    const Item item = find_item(tables, num_sequences, cut, index);
    *reinterpret_cast<Item*>(out) = item;
    out += sizeof(Item) / 4;
    for (int wg = 0; wg < cut.warpgroups; ++wg, out += sizeof(Piece) / 4) {
      *reinterpret_cast<Piece*>(out) = find_piece(item, cut, wg);
    }
  }
  return count;
}

// Write all items of windowed layers as rows of 8 ints; return how many.
extern "C" int list_window_items(int num_sequences, const int* starts, const int* lengths, int num_groups, int window,
                                 int* out) {
  std::vector<int> memory;
  const Tables tables = fill_tables(memory, num_sequences, starts, lengths, num_window_tiles);
  const int num_items = tables.tiles_before[num_sequences] * num_groups;
  for (int index = 0; index < num_items; ++index) {
    reinterpret_cast<WindowItem*>(out)[index] = find_window_item(tables, num_sequences, num_groups, window, index);
  }
  return num_items;
}

// Look `count` keys of 4 numbers up in turn; encoding makes the sum of a key's numbers, or fails where heads is 9. Write
// what was found (-1: an error); return how many were encoded.
extern "C" int find_maps(int count, const uint64_t* keys, int64_t* found) {
  KeptMaps<int64_t> kept;
  int num_encoded = 0;
  for (int i = 0; i < count; ++i, keys += 4) {
    const MapKey key{reinterpret_cast<const void*>(keys[0]), keys[1], keys[2], keys[3]};
    const int error = kept.find(key, &found[i], [&](int64_t* map) {
      ++num_encoded;
      *map = keys[0] + keys[1] + keys[2] + keys[3];
      return int(keys[1] == 9);
    });
    if (error) found[i] = -1;
  }
  return num_encoded;
}
