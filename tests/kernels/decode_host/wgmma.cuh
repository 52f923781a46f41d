// What kernels of decode use of cuda_common/wgmma.cuh on a CPU: products are done at once, nothing is waited for. A
// descriptor is an address, and in its upper word how far the next eight columns lie.
#pragma once

#include "decode_ptx.cuh"

namespace rose {

inline uint64_t descriptor_swizzle128(uint32_t address) {
  if (address % 1024) std::abort();
  return address | uint64_t(1024) << 32;
}
inline uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + bytes; }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <int kCount>
void settle(float (&)[kCount]) {}

}  // namespace rose
