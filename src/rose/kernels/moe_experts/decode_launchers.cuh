// What Python calls; `dispatch` starts the kernel that fits, or runs it on a CPU (tests).
#pragma once

extern "C" int launch_gate_up(const void* x, const void* ids, const void* codes, const void* scales,
                              const void* exponents, const void* bias, void* act, int pairs, int chosen, int experts,
                              int inner, int columns, float alpha, float limit, int is_fp8, int width, int warps,
                              int stages, int blocks, int is_dependent, cudaStream_t stream) {
  Call call = {};
  call.ids = static_cast<const int*>(ids);
  call.codes = static_cast<const uint8_t*>(codes);
  call.scales = scales;
  call.exponents = static_cast<const int*>(exponents);
  call.bias = static_cast<const __nv_bfloat16*>(bias);
  call.x = static_cast<const __nv_bfloat16*>(x);
  call.act = static_cast<__nv_bfloat16*>(act);
  call.pairs = pairs, call.chosen = chosen, call.experts = experts, call.rows = 2 * inner, call.columns = columns;
  call.alpha = alpha, call.limit = limit, call.is_fp8 = is_fp8 != 0;
  call.stages = stages, call.x_rows = pairs / chosen < width ? pairs / chosen : width;
  return dispatch<true>(call, width, warps, blocks, is_dependent != 0, stream);
}

extern "C" int launch_down(const void* act, const void* ids, const void* codes, const void* scales,
                           const void* exponents, const void* bias, void* y, int pairs, int chosen, int experts,
                           int rows, int columns, int is_fp8, int width, int warps, int stages, int blocks,
                           int is_dependent, cudaStream_t stream) {
  Call call = {};
  call.ids = static_cast<const int*>(ids);
  call.codes = static_cast<const uint8_t*>(codes);
  call.scales = scales;
  call.exponents = static_cast<const int*>(exponents);
  call.bias = static_cast<const __nv_bfloat16*>(bias);
  call.x = static_cast<const __nv_bfloat16*>(act);
  call.y = static_cast<float*>(y);
  call.pairs = pairs, call.chosen = chosen, call.experts = experts, call.rows = rows, call.columns = columns;
  call.is_fp8 = is_fp8 != 0;
  call.stages = stages, call.x_rows = pairs / chosen < width ? pairs / chosen : width;
  return dispatch<false>(call, width, warps, blocks, is_dependent != 0, stream);
}
