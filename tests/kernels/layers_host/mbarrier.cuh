// Barriers of sm_90 on a CPU where several blocks run at once: each has its shared memory and its barriers, addressed by
// their offset in it.
#pragma once

#include <condition_variable>
#include <map>

#include "launch.cuh"

inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }

namespace rose {

#ifdef ROSE_WATCHDOG
constexpr bool kWatchdog = true;
#else
constexpr bool kWatchdog = false;
#endif

struct Barrier {
  int wanted = 0, arrived = 0, phase = 0;
  int64_t pending_bytes = 0;
  std::shared_ptr<std::condition_variable> ended = std::make_shared<std::condition_variable>();
};
struct Memory {
  std::vector<uint8_t> bytes;
  uint8_t* base;  // aligned
  std::map<uint32_t, Barrier> barriers;
};
inline std::mutex barrier_mutex;
inline thread_local Memory* memory;

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - memory->base);
}
inline uint8_t* place(uint32_t address) { return memory->base + address; }
inline Barrier& barrier_at(uint32_t address) { return memory->barriers.at(address); }
inline void settle(Barrier& b) {
  if (b.arrived != b.wanted || b.pending_bytes != 0) return;
  b.arrived = 0, ++b.phase;
  b.ended->notify_all();
}
inline void mbarrier_init(uint32_t address, uint32_t arrivals) {
  if (address % 8) std::abort();
  std::lock_guard lock(barrier_mutex);
  memory->barriers[address].wanted = static_cast<int>(arrivals);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t address) {
  std::lock_guard lock(barrier_mutex);
  Barrier& b = barrier_at(address);
  ++b.arrived;
  settle(b);
}
constexpr int kWarpArrivals = 1;
inline void mbarrier_arrive_warp(uint32_t address, int lane) {
  if (lane == 0) mbarrier_arrive(address);
}
inline void mbarrier_arrive_expect(uint32_t address, uint32_t bytes) {
  std::lock_guard lock(barrier_mutex);
  Barrier& b = barrier_at(address);
  ++b.arrived;
  b.pending_bytes += bytes;
}
inline void mbarrier_wait(uint32_t address, uint32_t parity) {
  std::unique_lock lock(barrier_mutex);
  Barrier& b = barrier_at(address);
  b.ended->wait(lock, [&] { return (b.phase & 1) != static_cast<int>(parity); });
}
inline void named_sync(uint32_t id, uint32_t threads) { block->named_barrier(id, threads).arrive_and_wait(); }
inline void fence_proxy_async() {}
template <int kRegisters>
void registers_grow() {}
template <int kRegisters>
void registers_shrink() {}

}  // namespace rose
