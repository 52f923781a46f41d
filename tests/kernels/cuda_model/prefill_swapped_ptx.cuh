// prefill_swapped_ptx.cuh on the model.
#pragma once

#include "prefill_ptx.cuh"

namespace rose::moe {

inline void store_transposed(uint32_t at, const uint32_t (&v)[4]) {
  const int g = model::block->current % 32 / 4, t = model::block->current % 4;
  if (at % 16) model::fail("a row of a matrix is not aligned to 16 bytes");
  for (int m = 0; m < 4; ++m) {
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = __shfl_sync(0xffffffffu, at, 8 * m + 2 * t + i);
      const uint16_t half = uint16_t(v[m] >> 16 * i);
      std::memcpy(model::at(row + 2 * g, 2), &half, 2);
    }
  }
  model::warp_barrier();
}

}  // namespace rose::moe
