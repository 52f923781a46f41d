// launch.cuh of cuda_common on the model: a tensor map keeps what it was made from.
#pragma once

#include <cuda.h>

#include "blocks.cuh"
#include "machine.cuh"

namespace rose {

struct ModelMap {
  const uint8_t* base;
  uint64_t sizes[3], strides[2];
  uint32_t box[3];
  uint32_t element;
  int rank;
  bool is_swizzled;
};
static_assert(sizeof(ModelMap) <= sizeof(CUtensorMap), "it has to fit into a tensor map");

inline cudaError_t encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, int rank, const void* base,
                                     const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                                     CUtensorMapSwizzle swizzle) {
  ModelMap made{};
  made.base = static_cast<const uint8_t*>(base);
  made.rank = rank;
  made.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 1;
  made.is_swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (reinterpret_cast<uintptr_t>(base) % 16) return cudaErrorInvalidValue;
  for (int d = 0; d < 3; ++d) {
    made.sizes[d] = d < rank ? sizes[d] : 1;
    made.box[d] = d < rank ? box[d] : 1;
    if (made.box[d] == 0 || made.box[d] > 256) return cudaErrorInvalidValue;
  }
  for (int d = 0; d + 1 < rank; ++d) {
    made.strides[d] = strides[d];
    if (strides[d] % 16) return cudaErrorInvalidValue;
  }
  const uint32_t inner = made.box[0] * made.element;
  if (inner % 16 || (made.is_swizzled && inner > 128)) return cudaErrorInvalidValue;
  std::memcpy(map, &made, sizeof(made));
  return cudaSuccess;
}

}  // namespace rose
