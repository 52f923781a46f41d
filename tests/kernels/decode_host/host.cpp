// Runs the kernel of decode_stream.cuh on threads of a CPU, one block after the other.
#include "decode_stream.cuh"

namespace rose::moe_decode {
alignas(128) uint8_t shared[512 << 10];
}

using namespace rose::moe_decode;

template <bool kIsFp8, bool kGateUp, int kWarps, int kTiles>
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
        stream_kernel<kIsFp8, kGateUp, kWarps, kTiles>(call);
      });
    }
    for (auto& t : running) t.join();
    for (size_t i = bytes; i < sizeof shared; ++i) {
      if (shared[i] != 0xFF) std::abort();
    }
  }
}

template <bool kGateUp>
int dispatch(const Call& call, int is_fp8, int warps, int tiles, int blocks, int, void*) {
  if (!is_fp8 && warps == 8 && tiles == 1) return run<false, kGateUp, 8, 1>(call, blocks), 0;
  if (!is_fp8 && warps == 8 && tiles == 2) return run<false, kGateUp, 8, 2>(call, blocks), 0;
  if (is_fp8 && warps == 8 && tiles == 1) return run<true, kGateUp, 8, 1>(call, blocks), 0;
  if (is_fp8 && warps == 8 && tiles == 2) return run<true, kGateUp, 8, 2>(call, blocks), 0;
  return 1;
}

using cudaStream_t = void*;
using rose::moe_decode::Call;
#include "decode_launchers.cuh"
