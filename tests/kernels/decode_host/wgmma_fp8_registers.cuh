// The functions of cuda_common/wgmma_fp8_registers.cuh on a CPU.
#pragma once

#include "decode_e4m3_ptx.cuh"

namespace rose {

// A warp's 16 rows at a time. Source: PTX ISA, register fragments of wgmma with 8-bit types, and 128-byte swizzle: bits
// 4..6 of an address are turned by its bits 7..9.
template <int kN>
void wgmma_e4m3(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  Warp& w = my_warp();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  std::memcpy(w.slots[lane], a, sizeof a);
  w.step.arrive_and_wait();
  for (int i = 0; i < kN / 2; ++i) {
    const int column = 8 * (i / 4) + 2 * t + (i & 1), half = (i >> 1) & 1;
    if (!accumulate) d[i] = 0;
    for (int k = 0; k < 32; ++k) {
      const uint32_t word = w.slots[4 * g + (k % 16) / 4][half + 2 * (k / 16)];
      uint32_t address = uint32_t(b) + column / 8 * uint32_t(b >> 32) + column % 8 * 128 + k;
      address ^= ((address >> 7) & 7) << 4;
      d[i] += moe_decode::value_of_e4m3(word >> 8 * (k % 4) & 0xFF) * moe_decode::value_of_e4m3(*place(address));
    }
  }
  w.step.arrive_and_wait();
}

}  // namespace rose
