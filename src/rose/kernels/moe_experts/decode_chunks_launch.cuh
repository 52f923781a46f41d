// The launch of a kernel whose codes pass through rings of chunks (decode_chunks.cuh).
#pragma once

#include "decode_chunks.cuh"

namespace rose::moe_decode {

using RingKernel = void (*)(const Call, const CUtensorMap);

// bytes: of dynamic shared memory; is_dependent: may begin before the kernel before it has ended.
inline cudaError_t start_rings(RingKernel kernel, const Call& call, int threads, int bytes, int blocks,
                               bool is_dependent, cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map;
  const uint64_t row_bytes = call.columns / 2;
  const uint64_t sizes[2] = {row_bytes, static_cast<uint64_t>(call.experts) * call.rows}, strides[1] = {row_bytes};
  const uint32_t box[2] = {128, kTileRows};
  error = encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, call.codes, sizes, strides, box,
                            CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(most_blocks(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call, map);
}

}  // namespace rose::moe_decode
