// Launchers of prefill_wide.cuh in all its ways.
#define ROSE_WIDTHS 32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256
#include "../../src/rose/kernels/moe_experts/prefill_wide.cuh"

using namespace rose::moe;

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

extern "C" int launch_wide_ways_gate_up(const void* x, const float* token_scales, float token_scale, int rows,
                                   const void* codes, const void* offsets, const float* row_scales, const void* bias,
                                   int bias_is_bf16, const int* starts, const int* tiles, const int* expert_of_tile,
                                   int max_tiles, int experts, int n, int k, int late_ns, int ahead, int promote,
                                   uint8_t* hidden, float hidden_scale, float alpha, float limit,
                                   cudaStream_t stream) {
  wide::Problem p = problem(token_scales, token_scale, row_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile,
                            experts, n, k, late_ns, ahead);
  p.hidden = hidden;
  p.hidden_scale = hidden_scale;
  p.alpha = alpha;
  p.limit = limit;
  return launch_plan<true>(p, x, codes, offsets, rows, max_tiles, promote, stream);
}

extern "C" int launch_wide_ways_down(const void* x, const float* token_scales, float token_scale, int rows,
                                const void* codes, const void* offsets, const float* row_scales, const void* bias,
                                int bias_is_bf16, const int* starts, const int* tiles, const int* expert_of_tile,
                                int max_tiles, int experts, int n, int k, int late_ns, int ahead, int promote,
                                __nv_bfloat16* y, cudaStream_t stream) {
  wide::Problem p = problem(token_scales, token_scale, row_scales, bias, bias_is_bf16, starts, tiles, expert_of_tile,
                            experts, n, k, late_ns, ahead);
  p.y = y;
  return launch_plan<false>(p, x, codes, offsets, rows, max_tiles, promote, stream);
}
