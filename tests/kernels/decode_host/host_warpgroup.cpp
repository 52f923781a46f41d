// Runs the kernel of decode_warpgroup.cuh on threads of a CPU, one block after the other.
#include "decode_warpgroup.cuh"

namespace rose::moe_decode {
alignas(1024) uint8_t shared[512 << 10];
}

using namespace rose::moe_decode;

template <bool kGateUp, int kN, int kGroups, int kColumns>
int run(const Call& call, const Next& next, int blocks) {
  const int threads = kGroups * 128;
  const int bytes = WideLayout::make<kN, kGroups>(call).total;
  for (int b = 0; b < blocks; ++b) {
    std::memset(shared, 0xFF, sizeof shared);  // NaN everywhere
    Block state(threads);
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) {
      running.emplace_back([=, &call, &next, &state] {
        block = &state;
        threadIdx.x = i, blockIdx.x = b, gridDim.x = blocks;
        warpgroup_kernel<kGateUp, kN, kGroups, kColumns>(call, next);
      });
    }
    for (auto& t : running) t.join();
    for (size_t i = bytes; i < sizeof shared; ++i) {
      if (shared[i] != 0xFF) std::abort();
    }
  }
  return 0;
}

// Rows of 5, 5.5 and 8.75 groups of 128 columns: the ring of four ends with one, two and three.
template <bool kGateUp, int kN, int kGroups>
int run_columns(const Call& call, const Next& next, int blocks) {
  if (call.columns == 640) return run<kGateUp, kN, kGroups, 640>(call, next, blocks);
  if (call.columns == 704) return run<kGateUp, kN, kGroups, 704>(call, next, blocks);
  if (call.columns == 1120) return run<kGateUp, kN, kGroups, 1120>(call, next, blocks);
  return 1;
}

template <bool kGateUp>
int dispatch_wide(const Call& call, const Next& next, int width, int groups, int blocks, int, void*) {
  if (width == 8 && groups == 2) return run_columns<kGateUp, 8, 2>(call, next, blocks);
  if (width == 16 && groups == 1) return run_columns<kGateUp, 16, 1>(call, next, blocks);
  if (width == 24 && groups == 1) return run_columns<kGateUp, 24, 1>(call, next, blocks);
  return 1;
}

using cudaStream_t = void*;
using rose::moe_decode::Call;
using rose::moe_decode::Next;
#include "decode_warpgroup_launchers.cuh"
