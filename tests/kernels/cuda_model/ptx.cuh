// ptx.cuh of attention_prefill on the model.
#pragma once

#include "wgmma.cuh"

namespace rose::attention_prefill {

inline float exp2_mufu(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;  // .ftz
}

inline void load_matrices(uint32_t (&d)[4], uint32_t address) {
  const int lane = int(threadIdx.x) % 32;
  model::share_words(&address, 1, [&](const uint32_t(&all)[32][8]) {
    for (int i = 0; i < 4; ++i) std::memcpy(&d[i], model::at(all[8 * i + lane / 4][0], 16) + lane % 4 * 4, 4);
  });
}

inline void multiply_bf16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = int(threadIdx.x) % 32;
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  model::share_words(words, 6, [&](const uint32_t(&all)[32][8]) {
    auto element = [&](int from, int word, int k) { return bf16_value(uint16_t(all[from][word] >> 16 * (k & 1))); };
    for (int h = 0; h < 2; ++h) {
      for (int c = 0; c < 2; ++c) {
        for (int k = 0; k < 16; ++k) {
          const int column = 2 * (lane % 4) + c, part = k % 8 / 2, half = k / 8;
          d[2 * h + c] += element(lane / 4 * 4 + part, h + 2 * half, k) * element(4 * column + part, 4 + half, k);
        }
      }
    }
  });
}

inline void store_zeros(uint32_t address) {
  std::memset(model::at(address, 16), 0, 16);
  for (uint32_t byte = address - model::kShift; byte < address - model::kShift + 16; ++byte) {
    model::block->is_unfenced[byte] = 1;
    model::block->fibers[model::block->current].unfenced.push_back(byte);
  }
}

}  // namespace rose::attention_prefill
