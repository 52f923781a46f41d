// tma.cuh of cuda_common on the model: a copy is queued; the scheduler performs it some time later.
#pragma once

#include "launch.cuh"
#include "mbarrier.cuh"

namespace rose {

inline void tma_prefetch_map(const CUtensorMap*) {}

inline void tma_load(uint32_t shared, const CUtensorMap* tensor_map, uint32_t barrier, int x, int y, int z) {
  ModelMap map;
  std::memcpy(&map, tensor_map, sizeof(map));
  if (shared % 128 && (shared - model::kShift) % 128) model::fail("a copy's place is not aligned");
  if (map.is_swizzled && shared % 1024) model::fail("a swizzled copy's place is not aligned");
  if (x * int(map.element) % 16) model::fail("a copy's first column is not a multiple of 16 bytes");
  model::block->copies.push_back([=] {
    const int64_t first[3] = {x, y, z};
    const uint32_t inner = map.box[0] * map.element;
    for (uint32_t k = 0; k < map.box[2]; ++k) {
      for (uint32_t j = 0; j < map.box[1]; ++j) {
        for (uint32_t byte = 0; byte < inner; ++byte) {
          const int64_t column = first[0] + byte / map.element, row = first[1] + j, layer = first[2] + k;
          const bool is_in = column >= 0 && column < int64_t(map.sizes[0]) && row >= 0 && row < int64_t(map.sizes[1]) &&
                             layer >= 0 && layer < int64_t(map.sizes[2]);
          uint8_t value = 0;
          if (is_in) {
            value = map.base[column * map.element + byte % map.element + row * int64_t(map.strides[0]) +
                             layer * int64_t(map.strides[1])];
          }
          uint32_t to = shared + (k * map.box[1] + j) * inner + byte;
          if (map.is_swizzled) to ^= (to >> 7 & 7) << 4;
          *model::at(to, 1) = value;
          model::block->is_unfenced[to - model::kShift] = 0;
        }
      }
    }
    model::Barrier& done = barrier_at(barrier);
    done.bytes -= map.box[0] * map.box[1] * map.box[2] * map.element;
    done.settle();
  });
}

inline void tma_load_2d(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  tma_load(shared, map, barrier, x, y, 0);
}

inline void tma_load_3d(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  tma_load(shared, map, barrier, x, y, z);
}

}  // namespace rose
