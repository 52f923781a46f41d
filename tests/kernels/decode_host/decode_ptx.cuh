// The functions of moe_experts/decode_ptx.cuh on a CPU.
#pragma once

#include <chrono>

#include "mbarrier.cuh"
#include "products.cuh"

namespace rose::moe_decode {

inline void wait_for_kernel_before() {}
inline void let_next_kernel_start() {}

// Whether a copy arrives after those that were asked for later, as it may: who needs it has to wait for its barrier.
inline bool copies_come_late = false;

inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) std::abort();
  const auto copy = [=] {
    if (copies_come_late) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::memcpy(shared + to, from, bytes);
    std::lock_guard lock(barrier_mutex);
    Barrier& b = barriers.at(barrier);
    b.pending_bytes -= bytes;
    settle(b);
  };
  if (copies_come_late) {
    std::thread(copy).detach();  // ends before the block does, which waits for it
  } else {
    copy();
  }
}

}  // namespace rose::moe_decode
