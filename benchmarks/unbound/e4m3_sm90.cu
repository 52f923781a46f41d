// Launchers of the decode experts multiplied as E4M3; e4m3.cuh has the kernel.
#include "e4m3.cuh"

namespace {

using namespace rose;
using namespace rose::moe_decode;

constexpr int kColumns = 2880;  // of both matrices of both models: the loop over a row is laid out at compile time

template <bool kGateUp, int kN, int kGroups, int kStages>
cudaError_t start(const Call& call, int blocks, bool is_dependent, cudaStream_t stream) {
  auto kernel = e4m3_kernel<kGateUp, kN, kGroups, kStages, kColumns>;
  const int bytes = E4m3Layout::make<kN, kGroups, kStages>(call).total;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map;
  const uint64_t sizes[2] = {kColumns / 2, static_cast<uint64_t>(call.experts) * call.rows}, strides[1] = {kColumns / 2};
  const uint32_t box[2] = {128, kTileRows};
  error = encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, call.codes, sizes, strides, box,
                            CU_TENSOR_MAP_SWIZZLE_128B);
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
  return cudaLaunchKernelEx(&config, kernel, call, map);
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

#include "../../src/rose/kernels/moe_experts/decode_launchers.cuh"
