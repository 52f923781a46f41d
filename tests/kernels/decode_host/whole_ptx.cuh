// The functions of benchmarks/unbound/whole_ptx.cuh on a CPU, where a block is a process.
#pragma once

namespace rose::moe_decode {

inline void add_release(int* sum, int v) { __atomic_fetch_add(sum, v, __ATOMIC_RELEASE); }
inline int load_acquire(const int* p) {
  std::this_thread::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

}  // namespace rose::moe_decode
