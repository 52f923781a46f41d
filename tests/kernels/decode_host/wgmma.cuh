// What decode_e4m3.cuh uses of cuda_common/wgmma.cuh on a CPU: products are done at once, nothing is waited for.
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

}  // namespace rose
