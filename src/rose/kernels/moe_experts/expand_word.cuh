// Codes of mxfp4 to E4M3 by a table of their eight magnitudes: in prefill (prefill_swapped.cuh, prefill_wide.cuh) and in
// decode (decode_layers/layers_multiply.cuh).
#pragma once

#include "permute_ptx.cuh"

namespace rose::moe {

// Eight codes to two words of E4M3, all signs turned: a positive code has bit 7, a negative one has not (who
// adds up sums subtracts). A selector with its top bit set gives the sign of 0x40, nothing, and else 0x40 itself.
// `signs` is 0x40404040; if the compiler knows that, it makes it anew for each word.
__device__ __forceinline__ void expand_word(uint32_t codes, const uint32_t (&table)[2], uint32_t& first, uint32_t& second,
                                            uint32_t signs = 0x40404040u) {
  const uint32_t magnitudes = codes & 0x77777777u;
  first = permute_bytes(table[0], table[1], magnitudes) + 2 * permute_bytes(signs, signs, codes);
  second = permute_bytes(table[0], table[1], magnitudes >> 16) + 2 * permute_bytes(signs, signs, codes >> 16);
}

}  // namespace rose::moe
