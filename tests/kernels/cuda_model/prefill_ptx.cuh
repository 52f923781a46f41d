// prefill_ptx.cuh, and the functions in assembly of prefill_tiles.cuh, on the model.
#pragma once

#include "permute_ptx.cuh"
#include "wgmma_fp8.cuh"

namespace rose::moe {

template <int kCount>
inline void store_words(uint32_t at, const uint32_t (&v)[kCount]) {
  std::memcpy(model::at(at, 4 * kCount), v, 4 * kCount);
  for (uint32_t byte = at - model::kShift; byte < at - model::kShift + 4 * kCount; ++byte) {
    model::block->is_unfenced[byte] = 1;
    model::block->fibers[model::block->current].unfenced.push_back(byte);
  }
}

inline void store_shared(uint32_t at, uint32_t value) {
  const uint32_t one[1] = {value};
  store_words<1>(at, one);
}
inline void store_shared(uint32_t at, const uint32_t (&v)[4]) { store_words<4>(at, v); }
inline void load_shared(uint32_t (&v)[2], uint32_t at) {
  if (at % 8) model::fail("two words are not aligned to 8 bytes");
  std::memcpy(v, model::at(at, 8), 8);
}
inline void load_shared(uint32_t (&v)[4], uint32_t at) {
  if (at % 16) model::fail("four words are not aligned to 16 bytes");
  std::memcpy(v, model::at(at, 16), 16);
}
inline float load_shared(uint32_t at) {
  float value;
  std::memcpy(&value, model::at(at, 4), 4);
  return value;
}
inline void prefetch_l2(const void*) {}
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_reciprocal(float x) { return 1.f / x; }

inline uint32_t pack_half(float low, float high) {
  const __half both[2] = {__float2half(low), __float2half(high)};
  uint32_t out;
  std::memcpy(&out, both, 4);
  return out;
}

inline int thread_again() { return int(threadIdx.x); }

}  // namespace rose::moe
