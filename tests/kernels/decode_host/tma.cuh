// What decode_chunks.cuh uses of cuda_common/tma.cuh on a CPU.
#pragma once

#include "decode_ptx.cuh"

#define __grid_constant__

// A matrix of bytes, and boxes of 64 rows by 128 bytes with 128-byte swizzle.
struct CUtensorMap {
  const uint8_t* base;
  int64_t width, rows;
};

namespace rose {

inline void tma_prefetch_map(const CUtensorMap*) {}
inline void tma_load_2d(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  if (to % 1024) std::abort();
  for (int row = 0; row < 64; ++row) {
    for (int i = 0; i < 128; ++i) {
      uint32_t place = to + row * 128 + i;
      place ^= ((place >> 7) & 7) << 4;
      const bool is_in = x + i < map->width && y + row < map->rows;
      moe_decode::shared[place] = is_in ? map->base[(y + row) * map->width + x + i] : 0;
    }
  }
  std::lock_guard lock(barrier_mutex);
  Barrier& b = barriers.at(barrier);
  b.pending_bytes -= 64 * 128;
  settle(b);
}

}  // namespace rose
