// Launchers of the decode experts by warpgroups; decode_warpgroup.cuh has the kernel.
#include "decode_warpgroup.cuh"

namespace {

using namespace rose;
using namespace rose::moe_decode;

constexpr int kColumns = 2880;  // of both matrices of both models: the loop over a row is laid out at compile time

template <bool kGateUp, int kN, int kGroups>
cudaError_t start(const Call& call, const Next& next, int blocks, bool is_dependent, cudaStream_t stream) {
  auto kernel = warpgroup_kernel<kGateUp, kN, kGroups, kColumns>;
  const int bytes = WideLayout::make<kN, kGroups>(call).total;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kGroups * 128);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call, next);
}

template <bool kGateUp>
cudaError_t dispatch_wide(const Call& call, const Next& next, int width, int groups, int blocks, int is_dependent,
                          cudaStream_t stream) {
  if (call.columns != kColumns) return cudaErrorInvalidValue;
#define ROSE_CASE(n, g) \
  if (width == n && groups == g) return start<kGateUp, n, g>(call, next, blocks, is_dependent != 0, stream);
  ROSE_CASE(24, 3)
#ifdef ROSE_ALL_SHAPES  // for benchmarks
  ROSE_CASE(8, 4)
  ROSE_CASE(8, 3)
  ROSE_CASE(16, 4)
  ROSE_CASE(16, 3)
  ROSE_CASE(32, 3)
  ROSE_CASE(32, 2)
#endif
#undef ROSE_CASE
  return cudaErrorInvalidValue;
}

}  // namespace

#include "decode_warpgroup_launchers.cuh"
