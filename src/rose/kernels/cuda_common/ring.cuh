// A ring of stages in shared memory, as those who fill it and those who empty it walk it. Plain C++, see warp.cuh.
#pragma once

#include <cstdint>

namespace rose {

// The stage at hand and the parity of its current use: full is waited for with `parity`, empty with `parity ^ 1`.
template <int kStages>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace rose
