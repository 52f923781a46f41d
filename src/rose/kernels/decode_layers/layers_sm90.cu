// Launchers of the layers in one launch; layers.cuh has the kernel.
#include "launch.cuh"
#include "layers.cuh"

namespace {

using namespace rose;
using namespace rose::layers;

// Both published models. An H200 has 132 multiprocessors; 120 blocks share out all matrices but qkv evenly.
using GptOss = Model<2880, 2880, 64, 8, 8, 120>;
using AnyPlan = Plan<GptOss, 128>;  // whose workspace is the other's too

template <int kExperts>
cudaError_t run(const Call& call, cudaStream_t stream) {
  using P = Plan<GptOss, kExperts>;
  const cudaError_t error =
      cudaFuncSetAttribute(layers_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(P::kBlocks);
  config.blockDim = dim3(P::kThreads);
  config.dynamicSmemBytes = P::kSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, layers_kernel<P>, call);
}

cudaError_t dispatch(const Call& call, int experts, cudaStream_t stream) {
  if (call.num_layers > kMostLayers) return cudaErrorInvalidValue;
  if (experts == 32) return run<32>(call, stream);
  if (experts == 128) return run<128>(call, stream);
  return cudaErrorInvalidValue;
}

int workspace_bytes() {
  const int bytes = AnyPlan::kMarksAt;
#ifdef ROSE_TIMELINE
  return bytes + GptOss::kBlocks * kMostLayers * kMarks * 8;
#else
  return bytes;
#endif
}

}  // namespace

#include "layers_launchers.cuh"
