// Launchers of the decode experts multiplied as E4M3; decode_e4m3.cuh has the kernel.
#include "decode_chunks_launch.cuh"
#include "decode_e4m3.cuh"

namespace {

using namespace rose;
using namespace rose::moe_decode;

constexpr int kColumns = 2880;  // of both matrices of both models: the loop over a row is laid out at compile time

template <bool kGateUp, class S>
cudaError_t start(const Call& call, int blocks, bool is_dependent, cudaStream_t stream) {
  return start_rings(e4m3_kernel<kGateUp, S, kColumns>, call, S::kThreads, e4m3_layout<S>(call).total, blocks,
                     is_dependent, stream);
}

template <bool kGateUp>
cudaError_t dispatch(const Call& call, int width, int warps, int blocks, bool is_dependent, cudaStream_t stream) {
  if (call.columns != kColumns || call.is_fp8 || warps != 12) return cudaErrorInvalidValue;
#define ROSE_CASE(n, s, scales, parts)                                                        \
  if (width == n && call.stages == s) {                                                       \
    return start<kGateUp, Shape<n, 3, s, scales, parts>>(call, blocks, is_dependent, stream); \
  }
  ROSE_CASE(8, 12, 2, 2)
  ROSE_CASE(16, 9, 2, 2)
  ROSE_CASE(24, 6, 2, 1)
#undef ROSE_CASE
  return cudaErrorInvalidValue;
}

}  // namespace

#include "decode_launchers.cuh"
