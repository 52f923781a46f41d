// A model of one Hopper block on the CPU, for kernels written on cuda_common's primitives: every CUDA thread is a
// fiber, run in a changing order. Copies of the copy engine happen late and in any order; values stored by threads
// are invisible to the tensor core until fenced; waits that never end are reported.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace model {

constexpr uint32_t kSharedBytes = 232448, kShift = 16;  // dynamic shared memory begins at address 16
constexpr int kStack = 128 * 1024;

struct Barrier {
  int count = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  void settle() {
    if (pending == 0 && bytes == 0) {
      ++phase;
      pending = count;
    }
  }
};

struct Named {
  int arrived = 0, generation = 0;
};

struct Warp {
  int arrived = 0, generation = 0;
  uint32_t values[32];
  uint32_t fragments[32][4];  // operand A of a product, by lane
  uint32_t words[32][8];  // what lanes show one another in `share_words`
};

struct Accumulator {
  std::vector<float> values;
  int pending = 0;  // products that have yet to be added
};

struct Fiber {
  ucontext_t context;
  std::vector<uint8_t> stack;
  bool is_done = false;
  std::vector<uint32_t> unfenced;
  std::vector<std::vector<std::function<void()>>> products{1};  // asynchronous ones, by group; the last is open
  std::map<float*, Accumulator> accumulators;  // of products in flight, by where they belong
  const char* waits_for = "";
  int polls = 0;  // in vain, of the barrier it asks for
};

struct Block {
  std::vector<uint8_t> shared;
  std::vector<uint8_t> is_unfenced;  // by generic stores, read by the tensor core only after a fence
  std::map<uint32_t, Barrier> barriers;
  std::map<uint32_t, Named> named;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<std::function<void()>> copies;
  ucontext_t scheduler;
  std::function<void()> kernel;
  int current = 0, index = 0, grid = 1, synced = 0, sync_generation = 0;
  uint64_t progress = 0;
  uint32_t seed = 1;
  std::string problem;
};

inline Block* block = nullptr;
inline std::string last_problem;

inline uint32_t random_bits() {
  block->seed = block->seed * 1664525u + 1013904223u;
  return block->seed >> 8;
}

inline void fail(const std::string& words) {
  if (block->problem.empty()) block->problem = words + " (thread " + std::to_string(block->current) + ")";
}

inline void yield(const char* waits_for) {
  Fiber& fiber = block->fibers[block->current];
  fiber.waits_for = waits_for;
  swapcontext(&fiber.context, &block->scheduler);
  if (!block->problem.empty()) {
    fiber.is_done = true;
    swapcontext(&fiber.context, &block->scheduler);
  }
}

inline uint8_t* at(uint32_t address, uint32_t bytes) {
  if (address < kShift || address + bytes > kShift + block->shared.size() || address % std::min(bytes, 16u)) {
    fail("shared memory at " + std::to_string(address));
    static uint8_t nowhere[1 << 16];
    return nowhere;
  }
  return block->shared.data() + (address - kShift);
}

inline void entry() {
  block->kernel();
  Fiber& fiber = block->fibers[block->current];
  fiber.is_done = true;
  ++block->progress;
  swapcontext(&fiber.context, &block->scheduler);
}

inline void warp_barrier() {
  Warp& warp = block->warps[block->current / 32];
  const int generation = warp.generation;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
    ++block->progress;
  }
  while (warp.generation == generation) yield("its warp");
}

// Show `count` words to the other lanes of this warp until `read` has returned.
template <class Read>
inline void share_words(const uint32_t* words, int count, Read read) {
  Warp& warp = block->warps[block->current / 32];
  std::copy(words, words + count, warp.words[block->current % 32]);
  warp_barrier();
  read(warp.words);
  warp_barrier();
}

// Run one block of `threads` threads; returns what went wrong.
inline std::string run_block(const std::function<void()>& kernel, int index, int grid, int threads, uint32_t bytes) {
  Block state;
  block = &state;
  state.shared.assign(bytes, 0xA5);
  state.is_unfenced.assign(bytes, 0);
  state.fibers.resize(threads);
  state.warps.resize(threads / 32);
  state.kernel = kernel;
  state.index = index;
  state.grid = grid;
  state.seed = 77 + index;
  for (Fiber& fiber : state.fibers) {
    fiber.stack.resize(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &state.scheduler;
    makecontext(&fiber.context, entry, 0);
  }
  int idle = 0;
  for (bool any = true; any;) {
    any = false;
    const uint64_t before = state.progress;
    const int first = random_bits() % threads;
    for (int i = 0; i < threads; ++i) {
      state.current = (first + i) % threads;
      if (state.fibers[state.current].is_done) continue;
      any = true;
      swapcontext(&state.scheduler, &state.fibers[state.current].context);
    }
    for (size_t i = 0; i < state.copies.size();) {
      if (random_bits() % 3) {
        ++i;
        continue;
      }
      auto copy = state.copies[i];
      state.copies.erase(state.copies.begin() + i);
      copy();
      ++state.progress;
    }
    idle = state.progress == before ? idle + 1 : 0;
    if (idle > 300 && state.problem.empty()) {
      state.problem = "deadlock:";
      for (int t = 0; t < threads; ++t) {
        const bool is_like_last = t % 32 && state.fibers[t].waits_for == state.fibers[t - 1].waits_for;
        if (state.fibers[t].is_done || is_like_last) continue;
        state.problem += " from " + std::to_string(t) + " on " + state.fibers[t].waits_for;
      }
    }
  }
  if (state.problem.empty() && !state.copies.empty()) state.problem = "copies outlive the block";
  block = nullptr;
  return state.problem;
}

inline cudaError_t run(const std::function<void()>& kernel, unsigned grid, int threads, uint32_t bytes) {
  for (unsigned index = 0; index < grid; ++index) {
    last_problem = run_block(kernel, index, grid, threads, bytes);
    if (!last_problem.empty()) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

struct Dim {
  unsigned x, y = 0, z = 0;
};
inline Dim thread_index() { return {unsigned(block->current)}; }
inline Dim block_index() { return {unsigned(block->index)}; }
inline Dim grid_size() { return {unsigned(block->grid)}; }
inline Dim block_size() { return {unsigned(block->fibers.size())}; }

}  // namespace model

extern "C" inline __attribute__((used, visibility("default"))) const char* model_problem() {
  return model::last_problem.c_str();
}

#define threadIdx (model::thread_index())
#define blockIdx (model::block_index())
#define gridDim (model::grid_size())
#define blockDim (model::block_size())
#undef __shared__
#define __shared__
#undef __launch_bounds__
#define __launch_bounds__(...)
#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaGetDevice(...) (void)0
#define cudaDeviceGetAttribute(value, ...) (*(value) = 3)
#define cudaGetLastError() cudaSuccess

template <typename T>
inline T __ldg(const T* pointer) {
  return *pointer;
}

template <typename T>
inline T __ldcs(const T* pointer) {
  return *pointer;
}

template <typename A, typename B>
inline auto min(A a, B b) {
  return a < b ? a : b;
}

template <typename A, typename B>
inline auto max(A a, B b) {
  return a < b ? b : a;
}

inline void __trap() { model::fail("trap"); }
inline void __syncwarp() { model::warp_barrier(); }

inline void __syncthreads() {
  model::Block& b = *model::block;
  const int generation = b.sync_generation;
  if (++b.synced == int(b.fibers.size())) {
    b.synced = 0;
    ++b.sync_generation;
    ++b.progress;
  }
  while (b.sync_generation == generation) model::yield("the block");
}

template <typename T>
inline T __shfl_sync(uint32_t, T value, int source) {
  static_assert(sizeof(T) == 4, "words only");
  model::Warp& warp = model::block->warps[model::block->current / 32];
  std::memcpy(&warp.values[model::block->current % 32], &value, 4);
  model::warp_barrier();
  T found;
  std::memcpy(&found, &warp.values[source], 4);
  model::warp_barrier();
  return found;
}

inline bool __any_sync(uint32_t, bool value) {
  const uint32_t word = value;
  bool found = false;
  model::share_words(&word, 1, [&](const uint32_t(&words)[32][8]) {
    for (const auto& lane : words) found |= lane[0] != 0;
  });
  return found;
}

inline bool __all_sync(uint32_t all, bool value) { return !__any_sync(all, !value); }

template <typename T>
inline T __shfl_up_sync(uint32_t all, T value, int step) {
  const int lane = model::block->current % 32;
  return __shfl_sync(all, value, lane < step ? lane : lane - step);
}

template <typename T>
inline T __shfl_xor_sync(uint32_t all, T value, int mask) {
  return __shfl_sync(all, value, model::block->current % 32 ^ mask);
}

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline int __float_as_int(float value) { return int(__float_as_uint(value)); }
inline int __vimax3_s32(int a, int b, int c) { return std::max(a, std::max(b, c)); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t source = uint64_t(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(source >> 8 * (selectors >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
