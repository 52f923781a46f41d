// moe_experts/permute_ptx.cuh on a CPU.
#pragma once

#include <cstdint>

namespace rose::moe {

// Source: PTX ISA, prmt: selectors of four bits, of which the top one replicates the sign of the byte.
inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t source = uint64_t(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> 4 * i & 15;
    uint32_t byte = source >> 8 * (selector & 7) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << 8 * i;
  }
  return out;
}

}  // namespace rose::moe
