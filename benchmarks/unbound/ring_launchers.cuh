// What Python calls; `dispatch_ring` starts the kernel that fits (ring_sm90.cu), or runs it on a CPU (tests).
#pragma once

extern "C" int launch_gate_up_ring(const void* x, const void* ids, const void* codes, const void* scales,
                                   const void* bias, void* act, void* counters, int pairs,
                                   int chosen, int experts, int inner, int columns, int num_counters, float alpha,
                                   float limit, int width, int groups, int stages, int blocks, int is_dependent,
                                   cudaStream_t stream) {
  Call call = {};
  call.ids = static_cast<const int*>(ids);
  call.codes = static_cast<const uint8_t*>(codes);
  call.scales = scales;
  call.bias = static_cast<const __nv_bfloat16*>(bias);
  call.x = static_cast<const __nv_bfloat16*>(x);
  call.act = static_cast<__nv_bfloat16*>(act);
  call.counters = static_cast<int*>(counters);
  call.pairs = pairs, call.chosen = chosen, call.experts = experts, call.rows = 2 * inner, call.columns = columns;
  call.num_counters = num_counters, call.alpha = alpha, call.limit = limit;
  return dispatch_ring<true>(call, width, groups, stages, blocks, is_dependent, stream);
}

extern "C" int launch_down_ring(const void* act, const void* ids, const void* codes, const void* scales,
                                const void* bias, void* y, const void* weights, void* out, void* counters, int pairs,
                                int chosen, int experts, int rows, int columns, int width, int groups, int stages, int blocks,
                                int is_dependent, cudaStream_t stream) {
  Call call = {};
  call.ids = static_cast<const int*>(ids);
  call.codes = static_cast<const uint8_t*>(codes);
  call.scales = scales;
  call.bias = static_cast<const __nv_bfloat16*>(bias);
  call.x = static_cast<const __nv_bfloat16*>(act);
  call.y = static_cast<float*>(y);
  call.weights = static_cast<const __nv_bfloat16*>(weights);
  call.out = static_cast<__nv_bfloat16*>(out);
  call.counters = static_cast<int*>(counters);
  call.pairs = pairs, call.chosen = chosen, call.experts = experts, call.rows = rows, call.columns = columns;
  return dispatch_ring<false>(call, width, groups, stages, blocks, is_dependent, stream);
}
