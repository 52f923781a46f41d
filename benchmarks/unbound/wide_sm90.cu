// Launchers of wide.cuh.
#define ROSE_WIDTHS 32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256
#include "wide.cuh"

using namespace rose::moe;

extern "C" int launch_quantize_tokens(const __nv_bfloat16* x, const int* row_of_pair, uint8_t* values, float* scales,
                                      int tokens, int columns, int chosen, cudaStream_t stream) {
  if (columns > 3072 || chosen > 4) return cudaErrorInvalidValue;
  const int blocks = (tokens + 3) / 4;
  wide::quantize_tokens<4, 6><<<blocks, 128, 0, stream>>>(x, row_of_pair, values, scales, tokens, columns, chosen);
  return cudaGetLastError();
}

namespace {

wide::Problem problem(const float* token_scales, float token_scale, const float* row_scales, const void* bias,
                      int bias_is_bf16, const int* starts, const int* tiles, const int* expert_of_tile, int experts,
                      int n, int k, int late_ns, int ahead) {
  wide::Problem p{};
  p.rows = {starts, tiles, expert_of_tile, experts};
  p.token_scales = token_scales;
  p.token_scale = token_scale;
  p.row_scales = row_scales;
  p.bias = bias;
  p.bias_is_bf16 = bias_is_bf16;
  p.n = n;
  p.k = k;
  p.late_ns = late_ns;
  p.ahead = ahead;
  return p;
}

template <bool kGateUp>
cudaError_t launch_plan(const wide::Problem& p, const void* x, const void* codes, const void* offsets, int rows,
                        int max_tiles, int promote, cudaStream_t stream) {
  if (promote) return wide::launch<wide::Plan<kGateUp, true>>(p, x, codes, offsets, rows, max_tiles, stream);
  return wide::launch<wide::Plan<kGateUp, false>>(p, x, codes, offsets, rows, max_tiles, stream);
}

}  // namespace

// is_bf16: `hidden` is bf16, its columns in order.
extern "C" int launch_wide_gate_up(const void* x, const float* token_scales, float token_scale, int rows,
                                   const void* codes, const void* offsets, const float* row_scales, const void* bias,
                                   int bias_is_bf16, const int* starts, const int* tiles, const int* expert_of_tile,
                                   int max_tiles, int experts, int n, int k, int late_ns, int ahead, int promote,
                                   int is_bf16, uint8_t* hidden, float hidden_scale, float alpha, float limit,
                                   cudaStream_t stream) {
  wide::Problem p = problem(token_scales, token_scale, row_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile,
                            experts, n, k, late_ns, ahead);
  p.hidden = hidden;
  p.hidden_scale = hidden_scale;
  p.alpha = alpha;
  p.limit = limit;
  if (is_bf16) {
    p.y = reinterpret_cast<__nv_bfloat16*>(hidden);
    return wide::launch<wide::Plan<true, false, true>>(p, x, codes, offsets, rows, max_tiles, stream);
  }
  return launch_plan<true>(p, x, codes, offsets, rows, max_tiles, promote, stream);
}

extern "C" int launch_wide_down(const void* x, const float* token_scales, float token_scale, int rows,
                                const void* codes, const void* offsets, const float* row_scales, const void* bias,
                                int bias_is_bf16, const int* starts, const int* tiles, const int* expert_of_tile,
                                int max_tiles, int experts, int n, int k, int late_ns, int ahead, int promote,
                                __nv_bfloat16* y, cudaStream_t stream) {
  wide::Problem p = problem(token_scales, token_scale, row_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile,
                            experts, n, k, late_ns, ahead);
  p.y = y;
  return launch_plan<false>(p, x, codes, offsets, rows, max_tiles, promote, stream);
}
