// The router of few tokens on Hopper: a cluster of eight blocks works for eight tokens.
//
// Each block takes an eighth of the columns for all experts; its share of the weights is in registers before the
// kernel before has ended (programmatic dependent launch). Block r then gathers the parts of token r from all eight
// blocks' shared memory, in order, and one warp chooses. No atomics, no second launch, no memory in between.
#include "launch.cuh"
#include "mbarrier.cuh"

namespace {

using namespace rose;

constexpr int kBlocks = 8;     // of a cluster; also its tokens
constexpr int kWarps = 8;
constexpr int kMaxExperts = 128;
constexpr int kMaxChosen = 8;
constexpr int kSteps = 12;     // of 32 columns per block at most: 8 * 12 * 32 = 3072 columns

struct Call {
  const __nv_bfloat16* x;  // [tokens, columns]
  const __nv_bfloat16* w;  // [experts, columns]
  const __nv_bfloat16* bias;  // [experts] or null
  int* ids;                   // [tokens, chosen]
  __nv_bfloat16* weights;
  int tokens, columns, experts, chosen;
};

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Ordered (not .nc), or ptxas moves it behind the wait for the kernel before.
__device__ __forceinline__ uint4 load_weights(const __nv_bfloat16* source) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

__device__ __forceinline__ float load_remote(uint32_t address, uint32_t rank) {
  float value;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
      : "=f"(value)
      : "r"(address), "r"(rank)
      : "memory");
  return value;
}

// Rises with the value; both zeros are equal.
__device__ __forceinline__ uint32_t order(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// One warp: the best logits of [experts], best first, equal ones by lower id, and the softmax over them.
__device__ void choose(const Call& c, const float* logits, int token) {
  constexpr int kEach = kMaxExperts / 32;
  const int lane = threadIdx.x & 31;
  uint32_t keys[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = i * 32 + lane;
    keys[i] = e < c.experts ? max(order(logits[e]), 1u) : 0u;
  }
  float best = 0.0f, mine = 0.0f;
  int id = 0;
  for (int k = 0; k < c.chosen; ++k) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) top = max(top, keys[i]);
    top = __reduce_max_sync(~0u, top);
    unsigned lowest = kMaxExperts;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (keys[i] == top) lowest = i * 32 + lane;
    }
    lowest = __reduce_min_sync(~0u, lowest);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (lowest == i * 32 + lane) keys[i] = 0;
    }
    const float logit = logits[lowest];
    if (k == 0) best = logit;
    if (lane == k) mine = logit, id = lowest;
  }
  const float p = lane < c.chosen ? expf(mine - best) : 0.0f;
  float total = 0.0f;
  for (int k = 0; k < c.chosen; ++k) total += __shfl_sync(~0u, p, k);
  if (lane < c.chosen) {
    c.ids[token * c.chosen + lane] = id;
    c.weights[token * c.chosen + lane] = __float2bfloat16(p / total);
  }
}

// kSplits warps share out a block's columns for each 16 experts. Grid: eight blocks per eight tokens.
template <int kSplits>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kWarps * 32, 1) route_kernel(const Call c) {
  constexpr int kMine = kSteps / kSplits;
  __shared__ float parts[kSplits][kBlocks][kMaxExperts / kSplits + 4];
  __shared__ float logits[kMaxExperts];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
  const int tile = warp / kSplits, split = warp % kSplits;
  const int rank = cluster_rank(), first_token = blockIdx.x / kBlocks * kBlocks;
  const int steps = c.columns / 32;
  const int begin = steps * rank / kBlocks, end = steps * (rank + 1) / kBlocks;
  const int row = tile * 16 + g;
  const __nv_bfloat16* low = c.w + static_cast<size_t>(min(row, c.experts - 1)) * c.columns + t * 8;
  const __nv_bfloat16* high = c.w + static_cast<size_t>(min(row + 8, c.experts - 1)) * c.columns + t * 8;

  uint4 a[kMine] = {}, b[kMine] = {}, q[kMine] = {};
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int step = begin + split + i * kSplits;
    if (step < end) {
      a[i] = load_weights(low + step * 32);
      b[i] = load_weights(high + step * 32);
    }
  }
  float bias = 0.0f;
  if (c.bias != nullptr && threadIdx.x < c.experts) bias = __bfloat162float(c.bias[threadIdx.x]);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const __nv_bfloat16* x = c.x + static_cast<size_t>(min(first_token + g, c.tokens - 1)) * c.columns + t * 8;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int step = begin + split + i * kSplits;
    if (step < end) q[i] = __ldcg(reinterpret_cast<const uint4*>(x + step * 32));
  }
  float acc[2][4] = {};
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    mma(acc[0], a[i].x, b[i].x, a[i].y, b[i].y, q[i].x, q[i].y);
    mma(acc[1], a[i].z, b[i].z, a[i].w, b[i].w, q[i].z, q[i].w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    parts[split][2 * t + (i & 1)][row + (i >> 1) * 8] = acc[0][i] + acc[1][i];
  }
  if constexpr (kSplits > 1) {
    __syncthreads();
    for (int i = threadIdx.x; i < kBlocks * c.experts; i += kWarps * 32) {
      const int token = i / c.experts, e = i % c.experts;
      float sum = parts[0][token][e];
#pragma unroll
      for (int s = 1; s < kSplits; ++s) sum += parts[s][token][e];
      parts[0][token][e] = sum;
    }
  }
  cluster_sync();
  const int token = first_token + rank;
  if (threadIdx.x < c.experts) {
    const uint32_t address = shared_address(&parts[0][rank][threadIdx.x]);
    float sum = load_remote(address, 0);
#pragma unroll
    for (int r = 1; r < kBlocks; ++r) sum += load_remote(address, r);
    logits[threadIdx.x] = sum + bias;
  }
  // Nobody leaves while others read its shared memory; the choice needs only this block's.
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  __syncthreads();
  if (warp == 0 && token < c.tokens) choose(c, logits, token);
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <int kSplits>
cudaError_t start(const Call& call, bool is_dependent, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((call.tokens + kBlocks - 1) / kBlocks * kBlocks);
  config.blockDim = dim3(kWarps * 32);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, route_kernel<kSplits>, call);
}

}  // namespace

extern "C" int launch_route(const void* x, const void* w, const void* bias, void* ids, void* weights, int tokens,
                            int columns, int experts, int chosen, int is_dependent, cudaStream_t stream) {
  if (experts > kMaxExperts || chosen > kMaxChosen || columns % 32 || columns > kBlocks * kSteps * 32) {
    return cudaErrorInvalidValue;
  }
  const Call call = {static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(w),
                     static_cast<const __nv_bfloat16*>(bias), static_cast<int*>(ids),
                     static_cast<__nv_bfloat16*>(weights), tokens, columns, experts, chosen};
  if (experts <= 32) return start<4>(call, is_dependent != 0, stream);
  if (experts <= 64) return start<2>(call, is_dependent != 0, stream);
  return start<1>(call, is_dependent != 0, stream);
}
