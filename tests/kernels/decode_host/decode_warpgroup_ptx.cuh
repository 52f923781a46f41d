// The functions of moe_experts/decode_warpgroup_ptx.cuh on a CPU.
#pragma once

#include "decode_ptx.cuh"

namespace rose::moe_decode {

inline uint4 load_once(const uint8_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) std::abort();
  uint4 v;
  std::memcpy(&v, p, 16);
  return v;
}
inline void copy_async(uint32_t to, const void* from) {
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16) std::abort();
  std::memcpy(shared + to, from, 16);
}
inline void copy_async_commit() {}
inline void copy_async_wait() {}
inline void prefetch_bulk(const void*, uint32_t bytes) {
  if (bytes % 16) std::abort();
}

}  // namespace rose::moe_decode
