// What Python calls; `dispatch` starts the kernel that fits, or runs it on a CPU (tests).
#pragma once

extern "C" int launch_decode_layers(const void* table, int layers, void* residual, const void* position,
                                    const void* length, const void* full_table, const void* window_table,
                                    const void* full_slot, const void* window_slot, const void* cos_sin, void* workspace,
                                    int experts, int page_tokens, int window_tokens, float eps, float alpha, float limit,
                                    cudaStream_t stream) {
  Call call = {};
  call.layers = static_cast<const Layer*>(table);
  call.num_layers = layers;
  call.residual = static_cast<__nv_bfloat16*>(residual);
  call.position = static_cast<const int64_t*>(position);
  call.length = static_cast<const int*>(length);
  call.tables[0] = static_cast<const int*>(full_table), call.tables[1] = static_cast<const int*>(window_table);
  call.slots[0] = static_cast<const int64_t*>(full_slot), call.slots[1] = static_cast<const int64_t*>(window_slot);
  call.cos_sin = static_cast<const float*>(cos_sin);
  call.workspace = static_cast<uint8_t*>(workspace);
  call.page_tokens = page_tokens, call.window_tokens = window_tokens;
  call.eps = eps, call.alpha = alpha, call.limit = limit;
  return dispatch(call, experts, stream);
}

extern "C" int decode_layers_workspace_bytes() { return workspace_bytes(); }

// For who checks the attention by itself: where in the workspace the first launch of a stack of one layer leaves the
// projection as attention received it, and what came of it; bf16.
extern "C" int decode_layers_qkv_at() { return AnyPlan::kExchangeAt + AnyPlan::Exchange::kQkv; }
extern "C" int decode_layers_attended_at() { return AnyPlan::kExchangeAt + AnyPlan::Exchange::kAttended; }
