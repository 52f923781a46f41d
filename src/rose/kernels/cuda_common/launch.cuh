// Host side of a launcher: words for errors, and tensor maps for the bulk tensor copy engine (TMA).
// A launcher allocates nothing and waits for nothing, so that it may run during graph capture.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "blocks.cuh"

// Exported once per library; build.py turns the number a launcher returns into these words.
extern "C" inline __attribute__((used, visibility("default"))) const char* rose_error_words(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

namespace rose {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

// libcuda is found at run time: a machine without a driver can still load the library.
inline EncodeTiled find_encode_tiled() {
  static EncodeTiled found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult status;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                         cudaEnableDefault, &status);
    if (error != cudaSuccess || status != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return found;
}

// Describe a tensor of `rank` dimensions, innermost first. `strides_bytes` has rank - 1 entries (the innermost
// stride is the element), each a multiple of 16; `base` is aligned to 16. Elements outside read as zero.
inline cudaError_t encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, int rank, const void* base,
                                     const uint64_t* sizes, const uint64_t* strides_bytes,
                                     const uint32_t* box, CUtensorMapSwizzle swizzle) {
  EncodeTiled encode = find_encode_tiled();
  if (encode == nullptr) return cudaErrorInsufficientDriver;
  cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  CUresult result = encode(map, type, rank, const_cast<void*>(base),
                           reinterpret_cast<const cuuint64_t*>(sizes),
                           reinterpret_cast<const cuuint64_t*>(strides_bytes), box, ones,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace rose
