// Launchers of the experts for many tokens on Hopper; the kernels are in prefill_permute.cuh and prefill_grouped.cuh.
#include "prefill_grouped.cuh"
#include "prefill_permute.cuh"

using namespace rose::moe;

extern "C" int launch_sort(const int* ids, int num_pairs, int num_experts, int* row_of_pair, int* starts, int* tiles,
                           int* expert_of_tile, int* pairs, cudaStream_t stream) {
  if (num_experts > kMaxExperts) return cudaErrorInvalidValue;
  sort_pairs<<<1, kSortWarps * 32, 0, stream>>>(ids, num_pairs, num_experts, kTileRows, row_of_pair, starts, tiles,
                                                expert_of_tile, pairs);
  return cudaGetLastError();
}

extern "C" int launch_quantize(const __nv_bfloat16* x, const int* row_of_pair, uint8_t* values, float* scales,
                               int tokens, int columns, int chosen, int scales_stride, cudaStream_t stream) {
  const int threads = min(((columns + 127) / 128 * 16 + 31) / 32 * 32, 512);
  if (chosen <= 4) {
    quantize_rows<4><<<tokens, threads, 0, stream>>>(x, row_of_pair, values, scales, columns, chosen, scales_stride);
  } else if (chosen <= 8) {
    quantize_rows<8><<<tokens, threads, 0, stream>>>(x, row_of_pair, values, scales, columns, chosen, scales_stride);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

extern "C" int launch_combine(const __nv_bfloat16* y, const int* row_of_pair, const __nv_bfloat16* weights,
                              __nv_bfloat16* out, int tokens, int columns, int chosen, cudaStream_t stream) {
  const int64_t vectors = int64_t(tokens) * (columns / 8);
  const int blocks = int((vectors + 255) / 256);
  if (chosen <= 4) {
    combine_rows<4><<<blocks, 256, 0, stream>>>(y, row_of_pair, weights, out, vectors, columns, chosen);
  } else if (chosen <= 8) {
    combine_rows<8><<<blocks, 256, 0, stream>>>(y, row_of_pair, weights, out, vectors, columns, chosen);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

extern "C" int launch_expand(const void* codes, const uint8_t* exponents, const int* tile_exponents, void* values,
                             int experts, int rows, int columns, cudaStream_t stream) {
  const int64_t threads = int64_t(experts) * rows * (columns / 16);
  expand_mxfp4<<<unsigned((threads + 255) / 256), 256, 0, stream>>>(
      static_cast<const uint2*>(codes), exponents, tile_exponents, static_cast<uint4*>(values), threads, rows, columns);
  return cudaGetLastError();
}

namespace {

Grouped problem(const float* w_scales, const void* bias, int bias_is_bf16, const int* starts, const int* tiles,
                const int* expert_of_tile, const int* pairs, int experts, int n, int k) {
  Grouped p{};
  p.rows = {starts, tiles, expert_of_tile, pairs, experts};
  p.w_scales = w_scales;
  p.bias = bias;
  p.bias_is_bf16 = bias_is_bf16;
  p.n = n;
  p.k = k;
  return p;
}

}  // namespace

// shape: columns of a tile, 256 (groups of 128 channels) or 128 (groups of 64), + 1000 in clusters of two blocks.
extern "C" int launch_gate_up(const void* a, const float* a_scales, int a_scales_stride, int rows, const void* w,
                              const float* w_scales, const void* bias, int bias_is_bf16, const int* starts,
                              const int* tiles, const int* expert_of_tile, const int* pairs, int max_tiles, int experts, int n, int k,
                              uint8_t* hidden, float* hidden_scales, int hidden_scales_stride, float alpha,
                              float limit, int shape, cudaStream_t stream) {
  Grouped p = problem(w_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile, pairs, experts, n, k);
  p.hidden = hidden;
  p.hidden_scales = hidden_scales;
  p.scales_stride = hidden_scales_stride;
  p.alpha = alpha;
  p.limit = limit;
  switch (shape) {
    case 256:
      return launch_grouped<Shape<true, 128, 128, 2, 4>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, stream);
    case 1256:
      return launch_grouped<Shape<true, 128, 128, 2, 4, 2>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles,
                                                            stream);
    case 128:
      return launch_grouped<Shape<true, 128, 128, 1, 6>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// shape: columns of a tile, 256, 192 or 128, + 1000 in clusters; group: columns of A that share a scale, 128 or 64.
extern "C" int launch_down(const void* a, const float* a_scales, int a_scales_stride, int rows, const void* w,
                           const float* w_scales, const void* bias, int bias_is_bf16, const int* starts,
                           const int* tiles, const int* expert_of_tile, const int* pairs, int max_tiles, int experts, int n, int k,
                           __nv_bfloat16* y, int group, int shape, cudaStream_t stream) {
  Grouped p = problem(w_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile, pairs, experts, n, k);
  p.y = y;
  switch (group * 10000 + shape) {
    case 1280256:
      return launch_grouped<Shape<false, 128, 128, 2, 4>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, stream);
    case 1280192:
      return launch_grouped<Shape<false, 128, 192, 1, 5>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, stream);
    case 1281256:
      return launch_grouped<Shape<false, 128, 128, 2, 4, 2>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles,
                                                             stream);
    case 1281192:
      return launch_grouped<Shape<false, 128, 192, 1, 5, 2>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles,
                                                             stream);
    case 1280128:
      return launch_grouped<Shape<false, 128, 128, 1, 6>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, stream);
    case 640192:
      return launch_grouped<Shape<false, 64, 192, 1, 5>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, stream);
    case 640128:
      return launch_grouped<Shape<false, 64, 128, 1, 6>>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, stream);
    default:
      return cudaErrorInvalidValue;
  }
}
