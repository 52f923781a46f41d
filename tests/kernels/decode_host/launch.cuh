// A CPU's stand-in for CUDA's device language: one std::thread per CUDA thread, warps in step where they talk.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#define __grid_constant__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)

struct Dim3 {
  int x = 0;
};
inline thread_local Dim3 threadIdx, blockIdx, gridDim;

struct uint4 {
  uint32_t x, y, z, w;
};
struct int4 {
  int x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
struct uint2 {
  uint32_t x, y;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
struct __nv_bfloat16 {
  uint16_t bits;
};
inline uint32_t __float_as_uint(float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  return u;
}
inline float __uint_as_float(uint32_t u) {
  float v;
  std::memcpy(&v, &u, 4);
  return v;
}
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(uint32_t(v.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float v) {
  uint32_t u = __float_as_uint(v);
  return {uint16_t((u + 0x7FFF + ((u >> 16) & 1)) >> 16)};
}
inline float __expf(float v) { return std::exp(v); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t both = uint64_t(b) << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(both >> (8 * ((selector >> (4 * i)) & 7)) & 0xFF) << (8 * i);
  return found;
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }

// What the threads of one block share.
struct Warp {
  std::barrier<> step{32};
  uint32_t slots[32][8];
};
struct Block {
  std::barrier<> all;
  std::vector<std::unique_ptr<Warp>> warps;
  std::mutex named_mutex;
  std::map<unsigned, std::unique_ptr<std::barrier<>>> named;
  explicit Block(int threads) : all(threads) {
    for (int w = 0; w < threads / 32; ++w) warps.push_back(std::make_unique<Warp>());
  }
  std::barrier<>& named_barrier(unsigned id, unsigned threads) {
    std::lock_guard lock(named_mutex);
    auto& found = named[id];
    if (!found) found = std::make_unique<std::barrier<>>(threads);
    return *found;
  }
};
inline thread_local Block* block;
inline Warp& my_warp() { return *block->warps[threadIdx.x / 32]; }
inline void __syncthreads() { block->all.arrive_and_wait(); }
inline void __syncwarp() { my_warp().step.arrive_and_wait(); }

// What every lane of the warp has.
template <class T>
std::array<T, 32> gather(T v) {
  static_assert(sizeof(T) == 4);
  Warp& w = my_warp();
  std::memcpy(&w.slots[threadIdx.x & 31][0], &v, 4);
  w.step.arrive_and_wait();
  std::array<T, 32> found;
  for (int i = 0; i < 32; ++i) std::memcpy(&found[i], &w.slots[i][0], 4);
  w.step.arrive_and_wait();
  return found;
}
template <class T>
T exchange(T v, int from) {
  return gather(v)[from & 31];
}
template <class T>
T __shfl_sync(unsigned, T v, int from) {
  return exchange(v, from);
}
template <class T>
T __shfl_up_sync(unsigned, T v, int d) {
  int lane = threadIdx.x & 31;
  return exchange(v, lane >= d ? lane - d : lane);
}
inline unsigned __match_any_sync(unsigned, int v) {
  const std::array<int, 32> all = gather(v);
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= unsigned(all[i] == v) << i;
  return mask;
}
