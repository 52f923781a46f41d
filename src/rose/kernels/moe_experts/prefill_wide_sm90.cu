// Launchers of prefill_wide.cuh and of the quantisation for it.
#define ROSE_WIDTHS 32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256
#include "prefill_wide.cuh"
#include "prefill_wide_rows.cuh"

using namespace rose::moe;

namespace {

wide::Problem problem(const float* row_scales, const void* bias, int bias_is_bf16, const int* starts, const int* tiles,
                      const int* expert_of_tile, int experts, int n, int k, float hidden_unit) {
  wide::Problem p{};
  p.rows = {starts, tiles, expert_of_tile, experts};
  p.row_scales = row_scales;
  p.bias = bias;
  p.bias_is_bf16 = bias_is_bf16;
  p.n = n;
  p.k = k;
  p.hidden_unit = hidden_unit;
  return p;
}

}  // namespace

extern "C" int launch_quantize_tokens(const __nv_bfloat16* x, const int* row_of_pair, uint8_t* values, float* scales,
                                      int tokens, int columns, int chosen, cudaStream_t stream) {
  if (columns > 3072 || chosen > 4) return cudaErrorInvalidValue;
  const int blocks = (tokens + 3) / 4;
  wide::quantize_tokens<4, 6><<<blocks, 128, 0, stream>>>(x, row_of_pair, values, scales, tokens, columns, chosen);
  return cudaGetLastError();
}

extern "C" int launch_wide_gate_up(const void* x, int rows, const void* codes, const void* offsets,
                                   const float* row_scales, const void* bias, int bias_is_bf16, const int* starts,
                                   const int* tiles, const int* expert_of_tile, int max_tiles, int experts, int n,
                                   int k, float hidden_unit, const float* token_scales, uint8_t* hidden, float alpha,
                                   float limit, cudaStream_t stream) {
  wide::Problem p =
      problem(row_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile, experts, n, k, hidden_unit);
  p.token_scales = token_scales;
  p.hidden = hidden;
  p.alpha = alpha;
  p.limit = limit;
  return wide::launch<wide::Plan<true>>(p, x, codes, offsets, rows, max_tiles, stream);
}

extern "C" int launch_wide_down(const void* x, int rows, const void* codes, const void* offsets,
                                const float* row_scales, const void* bias, int bias_is_bf16, const int* starts,
                                const int* tiles, const int* expert_of_tile, int max_tiles, int experts, int n, int k,
                                float hidden_unit, __nv_bfloat16* y, cudaStream_t stream) {
  wide::Problem p =
      problem(row_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile, experts, n, k, hidden_unit);
  p.y = y;
  return wide::launch<wide::Plan<false>>(p, x, codes, offsets, rows, max_tiles, stream);
}
