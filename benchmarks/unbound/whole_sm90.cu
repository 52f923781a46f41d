// Launchers of the decode experts in one launch; whole.cuh has the kernels.
#include "whole.cuh"

namespace {

using namespace rose;
using namespace rose::moe_decode;

constexpr int kColumns = 2880;  // of both matrices of both models

template <typename Kernel, typename Arguments>
cudaError_t start(Kernel kernel, const Arguments& arguments, int blocks, int threads, int bytes, bool is_dependent,
                  cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

template <int kTiles>
cudaError_t run_width(const WholeCall& call, int blocks, bool is_dependent, cudaStream_t stream) {
  constexpr int kWarps = 8;
  const int bytes = Layout::make<false, kWarps, kTiles>(call.gate_up).total;
  return start(whole_kernel<kWarps, kTiles, kColumns>, call, blocks, kWarps * 32 + 32, bytes, is_dependent, stream);
}

cudaError_t run_whole(const WholeCall& call, int width, int blocks, bool is_dependent, cudaStream_t stream) {
  if (call.gate_up.columns != kColumns) return cudaErrorInvalidValue;
  if (width == 8) return run_width<1>(call, blocks, is_dependent, stream);
  if (width == 16) return run_width<2>(call, blocks, is_dependent, stream);
  return cudaErrorInvalidValue;
}

cudaError_t run_sum(const Sum& sum, int blocks, bool is_dependent, cudaStream_t stream) {
  return start(sum_kernel, sum, blocks, kSumThreads, 0, is_dependent, stream);
}

}  // namespace

#include "whole_launchers.cuh"
