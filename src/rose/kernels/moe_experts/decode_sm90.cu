// Launchers of the decode experts; decode_stream.cuh has the kernel.
#include "decode_stream.cuh"

namespace {

using namespace rose;
using namespace rose::moe_decode;

constexpr int kKnownColumns = 2880;  // of both matrices of both models

template <bool kIsFp8, bool kGateUp, int kWarps, int kTiles, int kColumns = 0>
cudaError_t start(const Call& call, int blocks, bool is_dependent, cudaStream_t stream) {
  auto kernel = stream_kernel<kIsFp8, kGateUp, kWarps, kTiles, kColumns>;
  const int bytes = Layout::make<kIsFp8, kWarps, kTiles>(call).total;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kWarps * 32 + 32);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call);
}

template <bool kGateUp>
cudaError_t dispatch(const Call& call, int width, int warps, int blocks, bool is_dependent, cudaStream_t stream) {
  if (call.columns == kKnownColumns && !call.is_fp8 && warps == 8) {
    if (width == 8) return start<false, kGateUp, 8, 1, kKnownColumns>(call, blocks, is_dependent, stream);
    if (width == 16) return start<false, kGateUp, 8, 2, kKnownColumns>(call, blocks, is_dependent, stream);
  }
#define ROSE_CASE(fp8, w, t) \
  if (call.is_fp8 == fp8 && warps == w && width == 8 * t) return start<fp8, kGateUp, w, t>(call, blocks, is_dependent, stream);
  ROSE_CASE(false, 8, 1)
  ROSE_CASE(false, 8, 2)
  ROSE_CASE(false, 12, 1)
  ROSE_CASE(false, 12, 2)
  ROSE_CASE(true, 8, 1)
  ROSE_CASE(true, 8, 2)
#undef ROSE_CASE
  return cudaErrorInvalidValue;
}

}  // namespace

#include "decode_launchers.cuh"
