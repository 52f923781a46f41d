// prefill_wide_ptx.cuh on the model.
#pragma once

#include "tma.cuh"
#include "wgmma_fp8_registers.cuh"

namespace rose::moe::wide {

inline void prefetch_3d(const CUtensorMap* map, int x, int y, int z) {
  ModelMap made;
  std::memcpy(&made, map, sizeof(made));
  const bool is_in = x >= 0 && uint64_t(x) < made.sizes[0] && y >= 0 && uint64_t(y) < made.sizes[1];
  if (!is_in || z != 0) model::fail("no such box");
}

}  // namespace rose::moe::wide
