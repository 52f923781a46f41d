// The functions of moe_experts/decode_ptx.cuh on a CPU.
#pragma once

#include "mbarrier.cuh"
#include "products.cuh"

namespace rose::moe_decode {

inline void wait_for_kernel_before() {}
inline void let_next_kernel_start() {}

inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) std::abort();
  std::memcpy(shared + to, from, bytes);
  std::lock_guard lock(barrier_mutex);
  Barrier& b = barriers.at(barrier);
  b.pending_bytes -= bytes;
  settle(b);
}

}  // namespace rose::moe_decode
