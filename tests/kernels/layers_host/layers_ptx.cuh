// The functions of decode_layers/layers_ptx.cuh on a CPU.
#pragma once

#include "decode_e4m3_ptx.cuh"

namespace rose::layers {

inline uint8_t* shared_memory() { return memory->base; }
inline uint32_t look(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
// Something that is not there yet lets its thread sleep, longer each time: hundreds of threads ask, and those who would
// send it need the processor.
template <class T>
T rest_unless(bool is_there, T v) {
  static thread_local int misses = 0;
  misses = is_there ? 0 : std::min(misses + 1, 6);
  if (!is_there) std::this_thread::sleep_for(std::chrono::milliseconds(1 << misses));
  return v;
}
inline uint32_t load_shared_by_all(const uint32_t* p) {
  const uint32_t v = look(p);
  return rest_unless(v != ~0u, v);
}
inline uint2 load_shared_by_all(const uint2* p) {
  const uint2 v = {look(&p->x), look(&p->y)};
  return rest_unless(v.x != ~0u && v.y != ~0u, v);
}
inline uint4 load_shared_by_all(const uint4* p) {
  const uint4 v = {look(&p->x), look(&p->y), look(&p->z), look(&p->w)};
  return rest_unless(v.x != ~0u && v.y != ~0u && v.z != ~0u && v.w != ~0u, v);
}
inline uint4 load_in_order(const uint4* p) { return load_shared_by_all(p); }
inline void store_for_all(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void fence_for_all() { std::atomic_thread_fence(std::memory_order_acq_rel); }
inline void add_one(uint64_t* sum) { __atomic_fetch_add(sum, 1, __ATOMIC_RELAXED); }
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
inline uint32_t shuffle_xor(uint32_t v, int d) { return exchange(v, (threadIdx.x & 31) ^ d); }
inline float shuffle_xor(float v, int d) { return exchange(v, (threadIdx.x & 31) ^ d); }
inline float shuffle(float v, int from) { return exchange(v, from); }
struct Split {
  uint32_t nearest, rest;
};
inline Split split_e4m3(float a, float b) {
  const uint32_t nearest = moe_decode::to_e4m3(a, b);
  const float2 back = moe_decode::from_e4m3(nearest);
  return {nearest, moe_decode::to_e4m3(a - back.x, b - back.y)};
}
inline uint32_t larger_halves(uint32_t a, uint32_t b) {
  return std::max(a & 0xFFFF, b & 0xFFFF) | std::max(a >> 16, b >> 16) << 16;
}
inline uint32_t smaller_halves(uint32_t a, uint32_t b) {
  return std::min(a & 0xFFFF, b & 0xFFFF) | std::min(a >> 16, b >> 16) << 16;
}
inline uint64_t read_once() { return 0; }
inline void bulk_load_once(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  moe_decode::bulk_load(to, from, bytes, barrier);
}

}  // namespace rose::layers
