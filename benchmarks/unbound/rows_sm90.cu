// Projections of up to eight tokens on Hopper: a matrix passes once from memory through registers into mma.m16n8k16.
//
// A block has 8 * kTiles rows of the matrix, and its warps share out the columns. All of a warp's weights are asked for
// at once, before the kernel before has ended (programmatic dependent launch); then come the activations, the products,
// and the sum over warps in shared memory. Tokens are the rows of operand A (the upper eight are nothing), rows of the
// matrix the columns of operand B. Columns inside a product may come in any order: a lane's 16 bytes of weights and of
// activations are fragments as they lie.
#include "launch.cuh"
#include "mbarrier.cuh"

namespace {

using namespace rose;

constexpr int kWarps = 8;

struct Call {
  const __nv_bfloat16* x;  // [tokens, columns], rows x_stride apart
  const __nv_bfloat16* w;  // [rows, columns]
  const __nv_bfloat16* bias;      // [rows] or null
  const __nv_bfloat16* residual;  // [tokens, rows] or null
  void* out;                      // [tokens, rows] bf16 or float
  int tokens, rows, x_stride;
};

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

// Ordered (not .nc), or ptxas moves it behind the wait for the kernel before.
__device__ __forceinline__ uint4 load_weights(const __nv_bfloat16* source) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

template <int kColumns, int kTiles, int kMinBlocks, bool kIsFloat>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks) rows_kernel(const Call c) {
  // Chunks of 32 columns, two to a turn: 128 bytes of a row.
  constexpr int kChunks = kColumns / 32, kTurns = (kChunks + 2 * kWarps - 1) / (2 * kWarps), kOwn = 2 * kTurns;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first_row = blockIdx.x * 8 * kTiles;
  __shared__ float parts[kWarps][8 * kTiles][8];

  auto chunk_of = [&](int i) { return (i / 2 * kWarps + warp) * 2 + (i & 1); };
  uint4 w[kTiles][kOwn];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const __nv_bfloat16* row = c.w + static_cast<size_t>(first_row + tile * 8 + g) * kColumns + t * 8;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      w[tile][i] = uint4{0, 0, 0, 0};
      if (chunk_of(i) < kChunks) w[tile][i] = load_weights(row + chunk_of(i) * 32);
    }
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  float d[kTiles][4] = {};
  const bool is_token = g < c.tokens;
  const __nv_bfloat16* x = c.x + static_cast<size_t>(is_token ? g : 0) * c.x_stride + t * 8;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    uint4 a = {0, 0, 0, 0};
    if (is_token && chunk_of(i) < kChunks) a = *reinterpret_cast<const uint4*>(x + chunk_of(i) * 32);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      mma(d[tile], a.x, a.y, w[tile][i].x, w[tile][i].y);
      mma(d[tile], a.z, a.w, w[tile][i].z, w[tile][i].w);
    }
  }
  // Lane (g, t) has token g for rows 2t and 2t + 1 of each tile.
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    parts[warp][tile * 8 + 2 * t][g] = d[tile][0], parts[warp][tile * 8 + 2 * t + 1][g] = d[tile][1];
  }
  __syncthreads();
  const int place = threadIdx.x % (8 * kTiles), token = threadIdx.x / (8 * kTiles), row = first_row + place;
  if (token < c.tokens && token < 8) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += parts[i][place][token];
    const size_t at = static_cast<size_t>(token) * c.rows + row;
    if (c.bias != nullptr) total += __bfloat162float(c.bias[row]);
    if (c.residual != nullptr) total += __bfloat162float(c.residual[at]);
    if constexpr (kIsFloat) {
      static_cast<float*>(c.out)[at] = total;
    } else {
      static_cast<__nv_bfloat16*>(c.out)[at] = __float2bfloat16(total);
    }
  }
}

template <int kColumns, int kTiles, int kMinBlocks>
cudaError_t start(const Call& call, bool is_float, bool is_dependent, cudaStream_t stream) {
  auto kernel = is_float ? rows_kernel<kColumns, kTiles, kMinBlocks, true>
                         : rows_kernel<kColumns, kTiles, kMinBlocks, false>;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(call.rows / (8 * kTiles));
  config.blockDim = dim3(kWarps * 32);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call);
}

}  // namespace

extern "C" int launch_rows(const void* x, const void* w, const void* bias, const void* residual, void* out, int tokens,
                           int rows, int columns, int x_stride, int is_float, int tiles, int is_dependent,
                           cudaStream_t stream) {
  const Call call = {static_cast<const __nv_bfloat16*>(x),        static_cast<const __nv_bfloat16*>(w),
                     static_cast<const __nv_bfloat16*>(bias),     static_cast<const __nv_bfloat16*>(residual),
                     out, tokens, rows, x_stride};
  if (tokens > 8 || rows % (8 * tiles)) return cudaErrorInvalidValue;
#define ROSE_CASE(k, t, b) \
  if (columns == k && tiles == t) return start<k, t, b>(call, is_float != 0, is_dependent != 0, stream);
  ROSE_CASE(2880, 1, 3)
  ROSE_CASE(2880, 2, 2)
  ROSE_CASE(4096, 1, 2)
  ROSE_CASE(4096, 2, 1)
#undef ROSE_CASE
  return cudaErrorInvalidValue;
}
