// A block's part of the history of a layer: which units of 16 tokens, and where their keys and values lie. They come
// through the ring, as weights do, between those of qkv and out.
#pragma once

#include "layers_block.cuh"

namespace rose::layers {

template <class P>
struct History {
  const Call& call;
  const Layer& layer;
  int length;  // the new token's included
  int kv_head, part, num_parts;  // of the kv head
  int first;                     // tokens from this one on are seen
  int begin, end;                // units [begin, end) of this block
  const int* table;

  __device__ History(const Call& c, const Layer& l, int tokens)
      : call(c), layer(l), length(tokens), kv_head(Block<P>::kv_head()), part(Block<P>::part()) {
    const bool has_window = l.has_window != 0;
    num_parts = has_window ? 1 : P::kSplit;
    table = c.tables[has_window];
    first = has_window ? max(length - c.window_tokens, 0) : 0;
    // A window of one token has no history, and no unit: it would be one without a token that is seen.
    const int seen = length - 1, first_unit = first / kUnit;
    const int units = first < seen ? (seen + kUnit - 1) / kUnit - first_unit : 0;
    begin = first_unit + units * part / num_parts, end = first_unit + units * (part + 1) / num_parts;
    if (part >= num_parts) end = begin;
  }

  __device__ bool is_active() const { return part < num_parts; }

  // Items of the ring, each of kItemUnits units but the last: their keys, then their values.
  __device__ int items() const { return (end - begin + P::kItemUnits - 1) / P::kItemUnits; }

  // The key in a row of a page; its value lies to_values() numbers further.
  template <class Page, class Row>
  __device__ __nv_bfloat16* key(Page page, Row row) const {
    return layer.kv + ((page * 2 * P::kKvHeads + kv_head) * call.page_tokens + row) * kHeadDim;
  }
  // Keys of a unit, [kUnit][kHeadDim].
  __device__ const __nv_bfloat16* keys(int unit) const {
    const int page_tokens = call.page_tokens, start = unit * kUnit;
    return key(static_cast<size_t>(table[start / page_tokens]), start % page_tokens);
  }
  __device__ size_t to_values() const { return static_cast<size_t>(P::kKvHeads) * call.page_tokens * kHeadDim; }
};

}  // namespace rose::layers
