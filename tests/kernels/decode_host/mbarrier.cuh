// Barriers of sm_90 on a CPU, addressed by their offset in the block's shared memory.
#pragma once

#include <condition_variable>
#include <map>

#include "launch.cuh"

namespace rose::moe_decode {
extern uint8_t shared[];
}

namespace rose {

struct Barrier {
  int wanted = 0, arrived = 0, phase = 0;
  int64_t pending_bytes = 0;
};
inline std::mutex barrier_mutex;
inline std::condition_variable phase_ended;
inline std::map<uint32_t, Barrier> barriers;

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - moe_decode::shared);
}
inline uint8_t* place(uint32_t address) { return moe_decode::shared + address; }
inline void settle(Barrier& b) {
  if (b.arrived != b.wanted || b.pending_bytes != 0) return;
  b.arrived = 0, ++b.phase;
  phase_ended.notify_all();
}
inline void mbarrier_init(uint32_t address, uint32_t arrivals) {
  if (address % 8) std::abort();
  std::lock_guard lock(barrier_mutex);
  barriers[address] = Barrier{static_cast<int>(arrivals)};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t address) {
  std::lock_guard lock(barrier_mutex);
  Barrier& b = barriers.at(address);
  ++b.arrived;
  settle(b);
}
constexpr int kWarpArrivals = 1;
inline void mbarrier_arrive_warp(uint32_t address, int lane) {
  if (lane == 0) mbarrier_arrive(address);
}
inline void mbarrier_arrive_expect(uint32_t address, uint32_t bytes) {
  std::lock_guard lock(barrier_mutex);
  Barrier& b = barriers.at(address);
  ++b.arrived;
  b.pending_bytes += bytes;
}
inline void mbarrier_wait(uint32_t address, uint32_t parity) {
  std::unique_lock lock(barrier_mutex);
  phase_ended.wait(lock, [&] { return (barriers.at(address).phase & 1) != static_cast<int>(parity); });
}
inline void named_sync(uint32_t id, uint32_t threads) { block->named_barrier(id, threads).arrive_and_wait(); }
inline void named_arrive(uint32_t id, uint32_t threads) { (void)block->named_barrier(id, threads).arrive(); }
inline void fence_proxy_async() {}
template <int kRegisters>
void registers_grow() {}
template <int kRegisters>
void registers_shrink() {}

}  // namespace rose
