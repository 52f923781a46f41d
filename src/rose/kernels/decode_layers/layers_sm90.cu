// Launchers of the layers in one launch; layers.cuh has the kernel.
#include "launch.cuh"
#include "layers.cuh"

namespace {

using namespace rose;
using namespace rose::layers;

// Both published models. An H200 was seen to hold fifteen clusters of eight at once, a block per multiprocessor, since
// not all parts of the chip have as many multiprocessors; 120 blocks share out all matrices but qkv evenly.
using GptOss = Model<2880, 2880, 64, 8, 8, 8, 15>;

// The launch of a plan, with its attributes.
template <class P>
struct Launch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};

  explicit Launch(cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = P::kCluster, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(P::kBlocks);
    config.blockDim = dim3(P::kThreads);
    config.dynamicSmemBytes = P::kSharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
  }

  static cudaError_t allow_shared_memory() {
    return cudaFuncSetAttribute(layers_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes);
  }
};

template <int kExperts>
cudaError_t run(const Call& call, cudaStream_t stream) {
  using P = Plan<GptOss, kExperts>;
  const cudaError_t error = Launch<P>::allow_shared_memory();
  if (error != cudaSuccess) return error;
  const Launch<P> launch(stream);
  return cudaLaunchKernelEx(&launch.config, layers_kernel<P>, call);
}

// Clusters that the device holds at once, or an error as a negative number.
template <int kExperts>
int clusters_at_once() {
  using P = Plan<GptOss, kExperts>;
  cudaError_t error = Launch<P>::allow_shared_memory();
  if (error != cudaSuccess) return -static_cast<int>(error);
  Launch<P> launch(nullptr);
  launch.config.numAttrs = 1;  // the clusters alone, as far as a place on the device is asked for
  int clusters = 0;
  error = cudaOccupancyMaxActiveClusters(&clusters, layers_kernel<P>, &launch.config);
  return error == cudaSuccess ? clusters : -static_cast<int>(error);
}

cudaError_t dispatch(const Call& call, int experts, cudaStream_t stream) {
  if (call.num_layers > kMostLayers) return cudaErrorInvalidValue;
  if (experts == 32) return run<32>(call, stream);
  if (experts == 128) return run<128>(call, stream);
  return cudaErrorInvalidValue;
}

int workspace_bytes() {
  const int bytes = Plan<GptOss, 128>::kMarksAt;
#ifdef ROSE_TIMELINE
  return bytes + GptOss::kBlocks * kMostLayers * kMarks * 8;
#else
  return bytes;
#endif
}

}  // namespace

#include "layers_launchers.cuh"

// How many clusters of the launch the device holds at once; GptOss::kClusters are needed. Negative: a CUDA error.
extern "C" int decode_layers_clusters(int experts) {
  return experts == 32 ? clusters_at_once<32>() : clusters_at_once<128>();
}
