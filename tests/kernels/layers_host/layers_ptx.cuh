// The functions of decode_layers/layers_ptx.cuh on a CPU.
#pragma once

#include "decode_ptx.cuh"

namespace rose::layers {

inline uint8_t* shared_memory() { return memory->base; }
inline void add_release(int* sum, int v) { __atomic_fetch_add(sum, v, __ATOMIC_RELEASE); }
inline int load_acquire(const int* p) {
  std::this_thread::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline int add_one_ordered(int* sum) { return __atomic_fetch_add(sum, 1, __ATOMIC_ACQ_REL); }
inline int64_t nanoseconds() { return 0; }
inline void trap() { std::abort(); }
inline float exp2_fast(float v) { return std::exp2(v); }
inline uint32_t pack_bf16(float low, float high) {
  return __float2bfloat16(low).bits | uint32_t(__float2bfloat16(high).bits) << 16;
}
inline uint32_t warp_max(uint32_t v) {
  const auto all = gather(v);
  return *std::max_element(all.begin(), all.end());
}
inline uint32_t warp_min(uint32_t v) {
  const auto all = gather(v);
  return *std::min_element(all.begin(), all.end());
}
inline float shuffle_xor(float v, int d) { return exchange(v, (threadIdx.x & 31) ^ d); }
inline float shuffle(float v, int from) { return exchange(v, from); }
inline uint64_t read_once() { return 0; }
inline void bulk_load_once(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  moe_decode::bulk_load(to, from, bytes, barrier);
}
inline void prefetch_line(const void*) {}
inline uint32_t remote_address(uint32_t shared, uint32_t rank) { return shared | (rank + 1) << 24; }
inline void store_remote(uint32_t address, float v) { std::memcpy(place(address), &v, 4); }
inline void arrive_remote(uint32_t barrier) { mbarrier_arrive(barrier); }
inline bool try_wait_cluster(uint32_t barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);
  return true;
}

}  // namespace rose::layers
