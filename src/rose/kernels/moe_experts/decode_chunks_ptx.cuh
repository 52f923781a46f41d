// Instructions of sm_90 that decode_chunks.cuh uses; tests/kernels/decode_host has the same functions for a CPU.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace rose::moe_decode {

// The two words of `descriptor_swizzle128`; only the lower one, in units of 16 bytes, depends on the place.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t shared) { return (shared & 0x3FFFF) >> 4 | 64 << 16; }
__device__ __forceinline__ uint64_t whole_descriptor(uint32_t low) {
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(0x40000040));
  return descriptor;
}

// One lane's instructions without a branch.
__device__ __forceinline__ void arrive_expect_if(bool does, uint32_t barrier, uint32_t bytes) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 state;\nsetp.ne.b32 p, %2, 0;\n"
      "@p mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier),
      "r"(bytes), "r"(static_cast<int>(does))
      : "memory");
}
__device__ __forceinline__ void bulk_load_if(bool does, uint32_t shared, const void* global, uint32_t bytes,
                                             uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "r"(static_cast<int>(does))
      : "memory");
}
__device__ __forceinline__ void tma_load_2d_if(bool does, uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                               int x, int y) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];\n}" ::
          "r"(shared),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y), "r"(static_cast<int>(does))
      : "memory");
}

}  // namespace rose::moe_decode
