// Tensor maps of earlier calls: layers and buffers come again, and encoding a map costs the host more than finding it.
// Plain C++, compiled for the host too: tests/kernels/attention_prefill/test_items.py runs this very code.
#pragma once

#include <cstdint>

namespace rose::attention_prefill {

// All that a map of queries, or of keys and values, is made from; a map holds nothing else and never expires.
struct MapKey {
  const void* base;  // null: no map
  uint64_t heads, rows, stride_bytes;  // heads 0: keys and values
  bool operator==(const MapKey& other) const {
    return base == other.base && heads == other.heads && rows == other.rows && stride_bytes == other.stride_bytes;
  }
};

// One map per slot; two keys that meet in one drive each other out.
template <class Map>
class KeptMaps {
 public:
  // Copy the map of `key`, which `encode(Map*)` makes where it is not kept; returns what that returns, 0 if all is well.
  template <class Encode>
  int find(const MapKey& key, Map* map, Encode encode) {
    Slot& slot = slots_[(reinterpret_cast<uint64_t>(key.base) * 0x9e3779b97f4a7c15u) >> (64 - kSlotBits)];
    if (!(slot.key == key)) {
      slot.key.base = nullptr;
      if (const int error = encode(&slot.map)) return error;
      slot.key = key;
    }
    *map = slot.map;
    return 0;
  }

 private:
  static constexpr int kSlotBits = 7;  // a few dozen layers' pages and the queries of a step
  struct Slot {
    MapKey key;
    Map map;
  };
  Slot slots_[1 << kSlotBits] = {};
};

}  // namespace rose::attention_prefill
