// Runs the kernel of decode_stream.cuh on threads of a CPU, one block after the other.
#include "decode_stream.cuh"

namespace rose::moe_decode {
alignas(128) uint8_t shared[512 << 10];
}

using namespace rose::moe_decode;

template <bool kIsFp8, bool kGateUp, int kWarps, int kTiles, int kColumns = 0>
void run(const Call& call, int blocks) {
  const int threads = kWarps * 32 + 32;
  const int bytes = Layout::make<kIsFp8, kWarps, kTiles>(call).total;
  for (int b = 0; b < blocks; ++b) {
    std::memset(shared, 0xFF, sizeof shared);  // NaN everywhere
    Block state(threads);
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) {
      running.emplace_back([=, &call, &state] {
        block = &state;
        threadIdx.x = i, blockIdx.x = b, gridDim.x = blocks;
        stream_kernel<kIsFp8, kGateUp, kWarps, kTiles, kColumns>(call);
      });
    }
    for (auto& t : running) t.join();
    for (size_t i = bytes; i < sizeof shared; ++i) {
      if (shared[i] != 0xFF) std::abort();
    }
  }
}

template <bool kGateUp>
int dispatch(const Call& call, int width, int warps, int blocks, bool, void*) {
  if (warps != 8) return 1;
  // 37 blocks of 32 columns: the last of two steps is partly out, for some warps altogether.
  if (call.columns == 1184 && !call.is_fp8 && width == 8) return run<false, kGateUp, 8, 1, 1184>(call, blocks), 0;
  if (call.columns == 1184 && !call.is_fp8 && width == 16) return run<false, kGateUp, 8, 2, 1184>(call, blocks), 0;
  if (!call.is_fp8 && width == 8) return run<false, kGateUp, 8, 1>(call, blocks), 0;
  if (!call.is_fp8 && width == 16) return run<false, kGateUp, 8, 2>(call, blocks), 0;
  if (call.is_fp8 && width == 8) return run<true, kGateUp, 8, 1>(call, blocks), 0;
  if (call.is_fp8 && width == 16) return run<true, kGateUp, 8, 2>(call, blocks), 0;
  return 1;
}

using cudaStream_t = void*;
#include "decode_launchers.cuh"
