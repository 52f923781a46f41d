// Launchers of the decode experts multiplied as E4M3; decode_e4m3.cuh has the kernel.
#include "decode_chunks_launch.cuh"
#include "decode_e4m3.cuh"

namespace {

using namespace rose;
using namespace rose::moe_decode;

constexpr int kColumns = 2880;  // of both matrices of both models: the loop over a row is laid out at compile time

template <bool kGateUp, int kN, int kGroups, int kStages>
cudaError_t start(const Call& call, int blocks, bool is_dependent, cudaStream_t stream) {
  auto kernel = e4m3_kernel<kGateUp, kN, kGroups, kStages, kColumns>;
  const int bytes = e4m3_layout<kN, kGroups, kStages>(call).total;
  return start_rings(kernel, call, kGroups * 128, bytes, blocks, is_dependent, stream);
}

template <bool kGateUp>
cudaError_t dispatch(const Call& call, int width, int warps, int blocks, bool is_dependent, cudaStream_t stream) {
  if (call.columns != kColumns || call.is_fp8) return cudaErrorInvalidValue;
#define ROSE_CASE(n, g, s)                                              \
  if (width == n && warps == 4 * g && call.stages == s) {               \
    return start<kGateUp, n, g, s>(call, blocks, is_dependent, stream); \
  }
  ROSE_CASE(8, 4, 4)
  ROSE_CASE(8, 3, 4)
  ROSE_CASE(16, 3, 4)
  ROSE_CASE(24, 3, 2)
#undef ROSE_CASE
  return cudaErrorInvalidValue;
}

}  // namespace

#include "decode_launchers.cuh"
