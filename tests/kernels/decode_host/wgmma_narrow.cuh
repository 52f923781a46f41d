// The warpgroup products of cuda_common/wgmma_narrow.cuh on a CPU: at once, a warp's 16 rows at a time.
#pragma once

#include "decode_ptx.cuh"

namespace rose {

inline uint64_t descriptor_swizzle128(uint32_t address) {
  if (address % 1024) std::abort();
  return address;
}
inline uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + bytes; }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <int kCount>
void settle(float (&)[kCount]) {}

// Source: PTX ISA, register fragments and 128-byte swizzle: bits 4..6 of an address are turned by its bits 7..9.
template <int kN>
void wgmma_narrow(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {
  using moe_decode::high_of;
  using moe_decode::low_of;
  Warp& w = my_warp();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  std::memcpy(w.slots[lane], a, sizeof a);
  w.step.arrive_and_wait();
  for (int i = 0; i < kN / 2; ++i) {
    const int column = 8 * (i / 4) + 2 * t + (i & 1), half = (i >> 1) & 1;
    for (int k = 0; k < 16; ++k) {
      const uint32_t pair = w.slots[4 * g + (k % 8) / 2][half + 2 * (k / 8)];
      uint64_t address = b + column * 128 + k * 2;
      address ^= ((address >> 7) & 7) << 4;
      uint16_t bits;
      std::memcpy(&bits, moe_decode::shared + address, 2);
      d[i] += (k & 1 ? high_of(pair) : low_of(pair)) * low_of(bits);
    }
  }
  w.step.arrive_and_wait();
}

}  // namespace rose
