// Launcher of the draw; draw_cluster.cuh has the kernel.
#include "draw_cluster.cuh"

namespace {

using namespace rose;
using namespace rose::draw;

constexpr int kThreads = 512, kCluster = 8;

template <class T, bool kMayFilter>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 2) draw_kernel(const Call c) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& space = *reinterpret_cast<Shared<kThreads, kCluster>*>(shared);
  float* values = reinterpret_cast<float*>(shared + (sizeof(Shared<kThreads, kCluster>) + 15) / 16 * 16);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  draw_row<T, kMayFilter, kThreads, kCluster>(c, space, values, blockIdx.x / kCluster, cluster_rank());
}

template <class T, bool kMayFilter>
cudaError_t start(const Call& call, int rows, bool is_dependent, cudaStream_t stream) {
  auto kernel = draw_kernel<T, kMayFilter>;
  size_t bytes = (sizeof(Shared<kThreads, kCluster>) + 15) / 16 * 16;
  if (kMayFilter) bytes += share_of<kCluster>(call.vocab) * sizeof(float);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows * kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call);
}

}  // namespace

extern "C" int launch_draw(const void* logits, const void* temperature, const void* top_k, const void* top_p,
                           const void* min_p, const void* seed, const void* position, void* tokens, int rows,
                           int vocab, int is_bf16, int is_filtered, int is_dependent, cudaStream_t stream) {
  Call call = {};
  call.logits = logits;
  call.temperature = static_cast<const float*>(temperature);
  call.top_k = static_cast<const int*>(top_k);
  call.top_p = static_cast<const float*>(top_p);
  call.min_p = static_cast<const float*>(min_p);
  call.seed = static_cast<const long long*>(seed);
  call.position = static_cast<const long long*>(position);
  call.tokens = static_cast<long long*>(tokens);
  call.vocab = vocab;
  const bool dependent = is_dependent != 0;
  if (is_bf16 && is_filtered) return start<__nv_bfloat16, true>(call, rows, dependent, stream);
  if (is_bf16) return start<__nv_bfloat16, false>(call, rows, dependent, stream);
  if (is_filtered) return start<float, true>(call, rows, dependent, stream);
  return start<float, false>(call, rows, dependent, stream);
}
