// Launchers of prefill_swapped.cuh and of the quantisation that orders columns for it.
#include "prefill_rows.cuh"
#include "prefill_swapped.cuh"

using namespace rose::moe;

extern "C" int launch_quantize_turned(const __nv_bfloat16* x, const int* row_of_pair, uint8_t* values, float* scales,
                                      int tokens, int columns, int chosen, int scales_stride, cudaStream_t stream) {
  const int threads = (columns / 16 + 31) / 32 * 32;  // columns is a multiple of 64
  if (threads > 1024 || chosen > 8) return cudaErrorInvalidValue;
  if (chosen <= 4) {
    quantize_wide<4, true><<<tokens, threads, 0, stream>>>(x, row_of_pair, values, scales, columns, chosen, scales_stride);
  } else {
    quantize_wide<8, true><<<tokens, threads, 0, stream>>>(x, row_of_pair, values, scales, columns, chosen, scales_stride);
  }
  return cudaGetLastError();
}

namespace {

swapped::Problem problem(const float* row_scales, const void* bias, int bias_is_bf16, const int* starts,
                         const int* tiles, const int* expert_of_tile, int experts, int n, int k) {
  swapped::Problem p{};
  p.rows = {starts, tiles, expert_of_tile, experts};
  p.row_scales = row_scales;
  p.bias = bias;
  p.bias_is_bf16 = bias_is_bf16;
  p.n = n;
  p.k = k;
  return p;
}

}  // namespace

extern "C" int launch_swapped_gate_up(const void* x, const float* x_scales, int x_scales_stride, int rows,
                                      const void* codes, const void* offsets, const float* row_scales, const void* bias,
                                      int bias_is_bf16, const int* starts, const int* tiles, const int* expert_of_tile,
                                      int max_tiles, int experts, int n, int k, uint8_t* hidden, float* hidden_scales,
                                      int hidden_scales_stride, float alpha, float limit, cudaStream_t stream) {
  swapped::Problem p = problem(row_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile, experts, n, k);
  p.hidden = hidden;
  p.hidden_scales = hidden_scales;
  p.scales_stride = hidden_scales_stride;
  p.alpha = alpha;
  p.limit = limit;
  return swapped::launch<swapped::Plan<true>>(p, x, x_scales, x_scales_stride, codes, offsets, rows, max_tiles, stream);
}

extern "C" int launch_swapped_down(const void* x, const float* x_scales, int x_scales_stride, int rows,
                                   const void* codes, const void* offsets, const float* row_scales, const void* bias,
                                   int bias_is_bf16, const int* starts, const int* tiles, const int* expert_of_tile,
                                   int max_tiles, int experts, int n, int k, __nv_bfloat16* y, cudaStream_t stream) {
  swapped::Problem p = problem(row_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile, experts, n, k);
  p.y = y;
  return swapped::launch<swapped::Plan<false>>(p, x, x_scales, x_scales_stride, codes, offsets, rows, max_tiles, stream);
}
