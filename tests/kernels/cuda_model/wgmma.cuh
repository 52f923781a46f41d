// wgmma.cuh of cuda_common on the model: each thread makes its own fragment, as late as its waits allow. Until then
// accumulators hold NaN, and operands are read only then, so that what is used or overwritten early shows.
#pragma once

#include <memory>

#include "mbarrier.cuh"

namespace rose {

inline uint64_t descriptor_swizzle128(uint32_t shared) {
  if (shared % 1024) model::fail("an operand is not aligned to 1024 bytes");
  return (shared & 0x3FFFF) >> 4;
}
inline uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

inline auto& products() { return model::block->fibers[model::block->current].products; }

inline void wgmma_fence() {}
inline void wgmma_commit() { products().emplace_back(); }

template <int kPending>
inline void wgmma_wait() {
  auto& groups = products();
  while (groups.size() > kPending + 1) {
    for (auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  model::warp_barrier();  // it is one instruction of the whole warp
}

template <typename T, int kCount>
inline void settle(T (&)[kCount]) {}

inline float bf16_value(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat16 both[2] = {__float2bfloat16(low), __float2bfloat16(high)};
  uint32_t out;
  std::memcpy(&out, both, 4);
  return out;
}

// Element (row, column) of an operand of 64 columns that begins at a descriptor, both counted from there.
inline float operand(uint64_t descriptor, int row, int column) {
  uint32_t address = (uint32_t(descriptor) << 4) + row / 8 * 1024 + row % 8 * 128 + 2 * column;
  address ^= (address >> 7 & 7) << 4;
  if (model::block->is_unfenced[address - model::kShift]) model::fail("the tensor core reads what is not fenced");
  uint16_t bits;
  std::memcpy(&bits, model::at(address, 2), 2);
  return bf16_value(bits);
}

// left(h, k): this thread's rows; right(k, n): the other operand.
template <int kN, class Left, class Right>
inline void multiply_later(float (&d)[kN / 2], int accumulate, Left left, Right right) {
  float* to = d;
  auto& flying = model::block->fibers[model::block->current].accumulators;
  if (!flying.count(to)) {
    flying[to].values.assign(d, d + kN / 2);
    std::fill(d, d + kN / 2, NAN);
  }
  ++flying[to].pending;
  const int lane = int(threadIdx.x) % 32;
  products().back().push_back([=, &flying] {
    model::Accumulator& sums = flying[to];
    for (int i = 0; i < kN / 2; ++i) {
      const int h = i >> 1 & 1, column = i / 4 * 8 + 2 * (lane % 4) + (i & 1);
      if (!accumulate) sums.values[i] = 0.0f;
      for (int k = 0; k < 16; ++k) sums.values[i] += left(h, k) * right(k, column);
    }
    if (--sums.pending == 0) {
      std::copy(sums.values.begin(), sums.values.end(), to);
      flying.erase(to);
    }
  });
}

template <int kN>
inline void wgmma_bf16(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
  const int row = int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 32 / 4;
  multiply_later<kN>(
      d, accumulate, [=](int h, int k) { return operand(a, row + 8 * h, k); },
      [=](int k, int n) { return operand(b, n, k); });
}

// A row's 16 elements lie in the words of four lanes; each shows its own as they are when the product is done.
template <int kN, class Right>
inline void multiply_registers(float (&d)[kN / 2], const uint32_t (&a)[4], int accumulate, Right right) {
  const uint32_t* words = a;
  auto row = std::make_shared<std::vector<float>>(32);
  const int lane = int(threadIdx.x) % 32;
  products().back().push_back([=] {
    model::share_words(words, 4, [&](const uint32_t(&all)[32][8]) {
      for (int h = 0; h < 2; ++h) {
        for (int k = 0; k < 16; ++k) {
          const uint32_t word = all[lane / 4 * 4 + k % 8 / 2][h + 2 * (k / 8)];
          (*row)[16 * h + k] = bf16_value(uint16_t(word >> 16 * (k & 1)));
        }
      }
    });
  });
  multiply_later<kN>(d, accumulate, [=](int h, int k) { return (*row)[16 * h + k]; }, right);
}

template <int kN>
inline void wgmma_bf16(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  multiply_registers<kN>(d, a, accumulate, [=](int k, int n) { return operand(b, n, k); });
}

template <int kN>
inline void wgmma_bf16_mn(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  multiply_registers<kN>(d, a, accumulate, [=](int k, int n) { return operand(b, k, n); });
}

}  // namespace rose
