// mbarrier.cuh of cuda_common on the model.
#pragma once

#include "machine.cuh"

namespace rose {

constexpr bool kWatchdog = false;

inline uint32_t shared_address(const void*) { return model::kShift; }

inline model::Barrier& barrier_at(uint32_t address) {
  auto found = model::block->barriers.find(address);
  if (found == model::block->barriers.end()) {
    model::fail("no barrier at " + std::to_string(address));
    static model::Barrier none;
    return none;
  }
  return found->second;
}

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  model::at(barrier, 8);
  model::Barrier& made = model::block->barriers[barrier];
  made.count = made.pending = int(arrivals);
}

inline void mbarrier_init_fence() {}

inline void mbarrier_arrive(uint32_t barrier) {
  model::Barrier& b = barrier_at(barrier);
  if (--b.pending < 0) model::fail("more arrivals than a barrier counts");
  b.settle();
  ++model::block->progress;
}

#ifdef ROSE_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
inline void mbarrier_arrive_warp(uint32_t barrier, int lane) {
  if (kWarpArrivals > 1 || lane == 0) mbarrier_arrive(barrier);
}

inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  barrier_at(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}

inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  model::yield("a barrier");
  const bool is_done = (barrier_at(barrier).phase & 1) != parity;
  // Whoever votes on the outcome makes progress for ever.
  int& polls = model::block->fibers[model::block->current].polls;
  polls = is_done ? 0 : polls + 1;
  if (polls > 20000) model::fail("polled a barrier in vain");
  return is_done;
}

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while ((barrier_at(barrier).phase & 1) == parity) model::yield("a barrier");
}

inline void named_arrive(uint32_t id, uint32_t threads) {
  model::Named& named = model::block->named[id];
  if (++named.arrived == int(threads)) {
    named.arrived = 0;
    ++named.generation;
  }
  ++model::block->progress;
}

inline void named_sync(uint32_t id, uint32_t threads) {
  const model::Named& named = model::block->named[id];
  const int generation = named.generation;
  named_arrive(id, threads);
  while (named.generation == generation) model::yield("a named barrier");
}

// Here a load has arrived before what follows it.
template <class... Words>
inline uint32_t mix(Words... words) {
  return (words ^ ...);
}
template <class... Words>
inline void named_sync_after(uint32_t id, uint32_t threads, Words...) {
  named_sync(id, threads);
}
template <class... Words>
inline void mbarrier_arrive_after(uint32_t barrier, Words...) {
  mbarrier_arrive(barrier);
}

inline void fence_proxy_async() {
  auto& unfenced = model::block->fibers[model::block->current].unfenced;
  for (uint32_t byte : unfenced) model::block->is_unfenced[byte] = 0;
  unfenced.clear();
}

template <int kRegisters>
inline void registers_grow() {}
template <int kRegisters>
inline void registers_shrink() {}

}  // namespace rose
