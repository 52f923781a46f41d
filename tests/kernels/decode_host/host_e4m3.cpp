// Runs the kernel of decode_e4m3.cuh on threads of a CPU, one block after the other.
#include "decode_e4m3.cuh"

namespace rose::moe_decode {
alignas(1024) uint8_t shared[512 << 10];
}

using namespace rose::moe_decode;

template <bool kGateUp, class S, int kColumns>
int run(const Call& call, int blocks) {
  const CUtensorMap map = {call.codes, kColumns / 2, int64_t(call.experts) * call.rows};
  const int threads = S::kThreads;
  const int bytes = e4m3_layout<S>(call).total;
  copies_come_late = true;  // scales, while chunks are there at once
  for (int b = 0; b < blocks; ++b) {
    std::memset(shared, 0xFF, sizeof shared);  // NaN everywhere
    Block state(threads);
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) {
      running.emplace_back([=, &call, &map, &state] {
        block = &state;
        threadIdx.x = i, blockIdx.x = b, gridDim.x = blocks;
        e4m3_kernel<kGateUp, S, kColumns>(call, map);
      });
    }
    for (auto& t : running) t.join();
    for (size_t i = bytes; i < sizeof shared; ++i) {
      if (shared[i] != 0xFF) std::abort();
    }
  }
  return 0;
}

// Rows of 10, 18, 22, 36 and 42 blocks: two, three, three, five and six chunks of eight.
template <bool kGateUp, class S>
int run_columns(const Call& call, int blocks) {
  if constexpr (S::kStages <= 2) {
    if (call.columns == 320) return run<kGateUp, S, 320>(call, blocks);
  }
  if constexpr (S::kStages <= 3) {
    if (call.columns == 576) return run<kGateUp, S, 576>(call, blocks);
    if (call.columns == 704) return run<kGateUp, S, 704>(call, blocks);
  }
  if constexpr (S::kStages <= 5) {
    if (call.columns == 1152) return run<kGateUp, S, 1152>(call, blocks);
  }
  if (call.columns == 1344) return run<kGateUp, S, 1344>(call, blocks);
  return 1;
}

template <bool kGateUp>
int dispatch(const Call& call, int width, int warps, int blocks, bool, void*) {
  if (width == 8 && warps == 4 && call.stages == 3) return run_columns<kGateUp, Shape<8, 1, 3, 2, 2>>(call, blocks);
  if (width == 8 && warps == 8 && call.stages == 4) return run_columns<kGateUp, Shape<8, 2, 4, 2, 2>>(call, blocks);
  if (width == 8 && warps == 12 && call.stages == 6) return run_columns<kGateUp, Shape<8, 3, 6, 3, 2>>(call, blocks);
  if (width == 16 && warps == 4 && call.stages == 2) return run_columns<kGateUp, Shape<16, 1, 2, 2, 2>>(call, blocks);
  if (width == 24 && warps == 4 && call.stages == 3) return run_columns<kGateUp, Shape<24, 1, 3, 2, 1>>(call, blocks);
  return 1;
}

using cudaStream_t = void*;
#include "decode_launchers.cuh"
