// Launchers of the experts for many tokens: prefill_fused.cuh, prefill_rows.cuh, prefill_permute.cuh.
#include "prefill_fused.cuh"
#include "prefill_rows.cuh"

using namespace rose::moe;

extern "C" int launch_sort(const int* ids, int num_pairs, int num_experts, int tile_rows, int* row_of_pair,
                           int* starts, int* tiles, int* expert_of_tile, cudaStream_t stream) {
  if (num_experts > kMaxExperts) return cudaErrorInvalidValue;
  sort_pairs_in_cluster<<<kSortBlocks, kSortWarps * 32, 0, stream>>>(ids, num_pairs, num_experts, tile_rows,
                                                                    row_of_pair, starts, tiles, expert_of_tile);
  return cudaGetLastError();
}

extern "C" int launch_quantize(const __nv_bfloat16* x, const int* row_of_pair, uint8_t* values, float* scales,
                               int tokens, int columns, int chosen, int scales_stride, cudaStream_t stream) {
  const int threads = (columns / 16 + 31) / 32 * 32;  // columns is a multiple of 64
  if (threads > 1024 || chosen > 8) return cudaErrorInvalidValue;
  if (chosen <= 4) {
    quantize_wide<4><<<tokens, threads, 0, stream>>>(x, row_of_pair, values, scales, columns, chosen, scales_stride);
  } else {
    quantize_wide<8><<<tokens, threads, 0, stream>>>(x, row_of_pair, values, scales, columns, chosen, scales_stride);
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

// exponents and tile_exponents are null where the weights are E4M3.
fused::Problem problem(const float* w_scales, const uint8_t* exponents, const int* tile_exponents, const void* bias,
                       int bias_is_bf16, const int* starts, const int* tiles, const int* expert_of_tile, int experts,
                       int n, int k) {
  fused::Problem p{};
  p.rows = {starts, tiles, expert_of_tile, experts};
  p.w_scales = w_scales;
  p.exponents = exponents;
  p.tile_exponents = tile_exponents;
  p.bias = bias;
  p.bias_is_bf16 = bias_is_bf16;
  p.n = n;
  p.k = k;
  return p;
}

// kStages256, kStages128: stages that fit with tiles of 256 and of 128 rows.
template <bool kGateUp, int kStages256, int kStages128>
cudaError_t launch_product(const fused::Problem& p, const void* a, const float* a_scales, int a_scales_stride,
                           const void* w, int rows, int max_tiles, int rows_of_tile, cudaStream_t stream) {
  using fused::Plan;
  const auto with = [&](auto plan) {
    return fused::launch<decltype(plan)>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, stream);
  };
  if (rows_of_tile == 256 && p.exponents != nullptr) return with(Plan<kGateUp, true, 2, kStages256>{});
  if (rows_of_tile == 256) return with(Plan<kGateUp, false, 2, kStages256>{});
  if (rows_of_tile == 128 && p.exponents == nullptr) return with(Plan<kGateUp, false, 1, kStages128>{});
  return cudaErrorInvalidValue;
}

}  // namespace

// rows_of_tile: 256 or 128 (E4M3 only).
extern "C" int launch_gate_up(const void* a, const float* a_scales, int a_scales_stride, int rows, const void* w,
                              const float* w_scales, const uint8_t* exponents, const int* tile_exponents,
                              const void* bias, int bias_is_bf16, const int* starts, const int* tiles,
                              const int* expert_of_tile, int max_tiles, int experts, int n, int k, uint8_t* hidden,
                              float* hidden_scales, int hidden_scales_stride, float alpha, float limit,
                              int rows_of_tile, cudaStream_t stream) {
  fused::Problem p = problem(w_scales, exponents, tile_exponents, bias, bias_is_bf16, starts, tiles, expert_of_tile,
                             experts, n, k);
  p.hidden = hidden;
  p.hidden_scales = hidden_scales;
  p.scales_stride = hidden_scales_stride;
  p.alpha = alpha;
  p.limit = limit;
  return launch_product<true, 3, 4>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, rows_of_tile, stream);
}

extern "C" int launch_down(const void* a, const float* a_scales, int a_scales_stride, int rows, const void* w,
                           const float* w_scales, const uint8_t* exponents, const int* tile_exponents,
                           const void* bias, int bias_is_bf16, const int* starts, const int* tiles,
                           const int* expert_of_tile, int max_tiles, int experts, int n, int k, __nv_bfloat16* y,
                           int rows_of_tile, cudaStream_t stream) {
  fused::Problem p = problem(w_scales, exponents, tile_exponents, bias, bias_is_bf16, starts, tiles, expert_of_tile,
                             experts, n, k);
  p.y = y;
  return launch_product<false, 4, 4>(p, a, a_scales, a_scales_stride, w, rows, max_tiles, rows_of_tile, stream);
}
