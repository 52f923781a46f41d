// The functions of sample/draw_ptx.cuh on a CPU; decode_host/launch.cuh has the threads.
#pragma once

#include "launch.cuh"

inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline int __clz(uint32_t v) { return v == 0 ? 32 : __builtin_clz(v); }
inline float __uint2float_rn(uint32_t v) { return static_cast<float>(v); }
inline void atomicMax(int* p, int v) {
  for (int seen = __atomic_load_n(p, __ATOMIC_SEQ_CST); seen < v;) {
    if (__atomic_compare_exchange_n(p, &seen, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return;
  }
}

namespace rose::draw {

// What the threads of one cluster share: the first bytes of each block's memory are the kernel's `Shared`.
struct Cluster {
  std::barrier<> all;
  std::vector<uint8_t*> memory;
};
inline thread_local Cluster* cluster;
inline thread_local int my_rank;

inline void cluster_sync() { cluster->all.arrive_and_wait(); }
template <class T>
T* remote(T* p, uint32_t rank) {
  return reinterpret_cast<T*>(cluster->memory[rank] + (reinterpret_cast<uint8_t*>(p) - cluster->memory[my_rank]));
}

template <class T>
T shuffle(T v, int from) {
  Warp& w = my_warp();
  std::memcpy(w.slots[threadIdx.x & 31], &v, sizeof v);
  w.step.arrive_and_wait();
  T found;
  std::memcpy(&found, w.slots[from & 31], sizeof v);
  w.step.arrive_and_wait();
  return found;
}
template <class T>
T shuffle_xor(T v, int d) {
  return shuffle(v, (threadIdx.x & 31) ^ d);
}
template <class T>
T shuffle_up(T v, int d) {
  const int lane = threadIdx.x & 31;
  return shuffle(v, lane >= d ? lane - d : lane);
}
inline unsigned ballot(bool v) {
  Warp& w = my_warp();
  w.slots[threadIdx.x & 31][0] = v;
  w.step.arrive_and_wait();
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= w.slots[i][0] << i;
  w.step.arrive_and_wait();
  return mask;
}
inline uint32_t warp_max(uint32_t v) {
  Warp& w = my_warp();
  w.slots[threadIdx.x & 31][0] = v;
  w.step.arrive_and_wait();
  for (int i = 0; i < 32; ++i) v = v > w.slots[i][0] ? v : w.slots[i][0];
  w.step.arrive_and_wait();
  return v;
}

inline float exp2_fast(float v) { return std::exp2(v); }
inline float exp_fast(float v) { return std::exp(v); }
inline float divide(float a, float b) { return a / b; }
inline void count_one(uint32_t* bin) { __atomic_fetch_add(bin, 1u, __ATOMIC_SEQ_CST); }
inline float to_float(float v) { return v; }
inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <class T>
float4 load_vector(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T))) std::abort();
  return {to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}

}  // namespace rose::draw
