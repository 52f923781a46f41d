// What Python calls; `run_whole` and `run_sum` start the kernels, or run them on a CPU (tests).
#pragma once

extern "C" int launch_whole(const void* x, const void* ids, const void* up_codes, const void* up_scales,
                            const void* up_bias, void* act, const void* down_codes, const void* down_scales,
                            const void* down_bias, void* y, void* written, void* marks, int pairs, int chosen,
                            int experts, int columns, float alpha, float limit, int width, int stages, int blocks,
                            int is_dependent, cudaStream_t stream) {
  WholeCall call = {};
  Call& up = call.gate_up;
  up.ids = static_cast<const int*>(ids);
  up.codes = static_cast<const uint8_t*>(up_codes), up.scales = up_scales;
  up.bias = static_cast<const __nv_bfloat16*>(up_bias);
  up.x = static_cast<const __nv_bfloat16*>(x), up.act = static_cast<__nv_bfloat16*>(act);
  up.pairs = pairs, up.chosen = chosen, up.experts = experts, up.rows = 2 * columns, up.columns = columns;
  up.alpha = alpha, up.limit = limit, up.stages = stages;
  up.x_rows = pairs / chosen < width ? pairs / chosen : width;
  Call& down = call.down;
  down = up;
  down.codes = static_cast<const uint8_t*>(down_codes), down.scales = down_scales;
  down.bias = static_cast<const __nv_bfloat16*>(down_bias);
  down.x = up.act, down.act = nullptr, down.y = static_cast<float*>(y), down.rows = columns;
  call.written = static_cast<int*>(written), call.marks = static_cast<int64_t*>(marks);
  return run_whole(call, width, blocks, is_dependent != 0, stream);
}

extern "C" int launch_sum(const void* y, const void* ids, const void* weights, void* out, void* written, int tokens,
                          int chosen, int columns, int num_written, int is_dependent, cudaStream_t stream) {
  const Sum sum = {static_cast<const float*>(y), static_cast<const int*>(ids),
                   static_cast<const __nv_bfloat16*>(weights), static_cast<__nv_bfloat16*>(out),
                   static_cast<int*>(written), chosen, columns, num_written};
  const int blocks = tokens * ((columns + kSumThreads - 1) / kSumThreads);
  return run_sum(sum, blocks, is_dependent != 0, stream);
}
