// What kernels of decode use of cuda_common/wgmma.cuh on a CPU: products are done at once, nothing is waited for. A
// descriptor is an address, and in its upper word how far the next eight columns lie.
#pragma once

#include "decode_ptx.cuh"

namespace rose {

inline uint32_t descriptor_low(uint32_t address) {
  if (address % 1024) std::abort();
  return address / 16;
}
template <int kStride = 1024>
uint64_t whole_descriptor(uint32_t low) {
  return low * 16 | uint64_t(kStride) << 32;
}
inline uint64_t descriptor_swizzle128(uint32_t address) { return whole_descriptor(descriptor_low(address)); }
inline uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + bytes; }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <int kCount>
void settle(float (&)[kCount]) {}

}  // namespace rose
