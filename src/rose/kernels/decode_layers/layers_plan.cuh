// All blocks of gpt-oss for a step of one token, in one launch: sizes, shares of the work, shared memory.
//
// The grid is resident as a whole, a block per multiprocessor. Weights do not depend on what is computed, so that each
// block streams its share of every matrix through one ring of stages without a pause, in the order of the model. Only
// the experts' weights wait for the router.
//
// A layer is five phases: qkv | attention | out | norm, router, gate_up | down. What a block has computed it writes to
// memory, where all who need it ask until it is there: a word tells by itself that it has been written, for before it
// was kEmpty (`Exchange`). Nothing else orders the phases.
#pragma once

#include "../moe_experts/decode_call.cuh"

namespace rose::layers {

constexpr int kHeadDim = 64;
constexpr int kChosen = 4;
constexpr int kGroup = 8;       // query heads of a kv head: the rows of a product in attention
constexpr int kTeams = 2;       // of warps that multiply; they take turns at the items of the ring (two: no more, no fewer)
constexpr int kParts = 2;       // buffers of partial sums of each team
constexpr int kUnit = 16;       // tokens of the history that a warp takes at a time
constexpr int kTileRows = 8;    // of mxfp4; an item has two tiles
constexpr int kGroupColumns = 128;  // of mxfp4, that a warp takes at a time
constexpr int kTables = 32;     // of codes as E4M3; in the last all are zero
constexpr int kMostLayers = 36;
constexpr int kMostExperts = 128;
constexpr int kPad = 64;        // bytes between rows of bf16 in shared memory, so that two rows meet different banks
constexpr int kCounterBytes = 128;  // at the begin of the workspace: how many blocks have left launches, a uint64
// A word of the exchange that was not written: two bf16, or a float, that no result is. Where instructions that add or
// round make no number, its bits are 0x7FFF, or 0x7FFFFFFF (PTX ISA, add, fma, cvt: canonical NaN).
constexpr uint32_t kEmpty = ~0u;

constexpr int at_least(int a, int b) { return a > b ? a : b; }
constexpr int at_most(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int rounded_up(int v, int to) { return (v + to - 1) / to * to; }

// Pointers of a layer, as Python lays them out.
struct Layer {
  const float* attention_norm;
  const __nv_bfloat16* qkv;
  const __nv_bfloat16* qkv_bias;
  const float* sinks;
  const __nv_bfloat16* out;
  const __nv_bfloat16* out_bias;
  const float* expert_norm;
  const __nv_bfloat16* router;
  const __nv_bfloat16* router_bias;
  const uint8_t* up_codes;
  const uint8_t* up_scales;
  const __nv_bfloat16* up_bias;
  const uint8_t* down_codes;
  const uint8_t* down_scales;
  const __nv_bfloat16* down_bias;
  __nv_bfloat16* kv;  // [pages, 2, kv heads, page_tokens, kHeadDim]
  int64_t has_window;
};

struct Call {
  const Layer* layers;
  int num_layers;
  __nv_bfloat16* residual;  // [hidden]
  const int64_t* position;
  const int* length;
  const int* tables[2];     // full, window: [pages]
  const int64_t* slots[2];
  const float* cos_sin;     // [positions, kHeadDim]
  uint8_t* workspace;
  int page_tokens, window_tokens;
  float eps, alpha, limit;
};

// For codes of mxfp4, by how many powers of two a block is below the largest: see expand_word.
struct Tables {
  uint4 bytes[kTables];
  uint32_t ones;  // all bits, which the compiler does not know
};

template <int kHidden_, int kInner_, int kQueryHeads_, int kKvHeads_, int kTeamWarps_, int kBlocks_>
struct Model {
  static constexpr int kHidden = kHidden_, kInner = kInner_, kQueryHeads = kQueryHeads_, kKvHeads = kKvHeads_;
  static constexpr int kTeamWarps = kTeamWarps_, kBlocks = kBlocks_;
  static constexpr int kWarps = kTeams * kTeamWarps, kMultiplying = kWarps * 32;
  // Warps that multiply, and a warpgroup of those that do not: one per team that finishes its items, one that loads.
  static constexpr int kThreads = kMultiplying + 128;
  // How often they go round until each of so many has had one of them.
  __host__ __device__ static constexpr int steps(int count) { return (count + kMultiplying - 1) / kMultiplying; }
  // A block is given 96 registers for each of its 640 threads; what the roles take must not add up to more.
  static constexpr int kMultiplyRegisters = 104, kOtherRegisters = 64;
  static constexpr int kQkvRows = (kQueryHeads + 2 * kKvHeads) * kHeadDim, kAttended = kQueryHeads * kHeadDim;
  // A kv head has kSplit blocks: they compute its queries, keys and values, and attend, one of them where a window is
  // seen.
  static constexpr int kSplit = kBlocks / kKvHeads;
  // Rows of the residual stream that a block owns: it computes them, out and down, and keeps them.
  static constexpr int kOwnRows = kHidden / kBlocks;
  // An item fills a stage: rows of bf16, or 16 rows of mxfp4.
  static constexpr int kQkvItemRows = 4, kOutItemRows = kOwnRows % 3 == 0 ? 3 : 4;
  static constexpr int kQkvItems = (kGroup + 2) * kHeadDim / kQkvItemRows;  // of one kv head
  static constexpr int kOutItems = kOwnRows / kOutItemRows;                 // of one block
  static constexpr int kUpItems = 2 * kInner / (2 * kTileRows);             // of one expert
  static constexpr int kDownItems = kOwnRows / kTileRows * kChosen / 2;     // of one block: two experts each
  static_assert(kQueryHeads == kGroup * kKvHeads && kHidden % 64 == 0 && kInner % 64 == 0);
  static_assert(kBlocks % kKvHeads == 0 && kHidden % kBlocks == 0 && kOwnRows % kTileRows == 0);
  static_assert(kOwnRows % kOutItemRows == 0 && kOwnRows <= kTeams * 32);
  // Each team of each block has an item in every phase: who has what follows from one knows that they are through.
  static_assert(kQkvItems >= kTeams * kSplit && kChosen * kUpItems >= kTeams * kBlocks && kOutItems >= kTeams);
  static_assert(kTeamWarps % 4 == 0);  // warpgroups
};

template <class M, int kExperts_>
struct Plan : M {
  static constexpr int kExperts = kExperts_;
  static_assert(kExperts <= kMostExperts);
  static constexpr int kMostOwnExperts = (kExperts + M::kBlocks - 1) / M::kBlocks;  // whose logits a block computes

  static constexpr int kHiddenRow = M::kHidden * 2 + kPad, kAttendedRow = M::kAttended * 2 + kPad;
  // Columns of mxfp4, to the end of the last step (layers_multiply.cuh). Activations beside it have two bytes a column.
  __host__ __device__ static constexpr int padded(int columns) { return rounded_up(columns, M::kTeamWarps * kGroupColumns); }
  static constexpr int kHiddenChunks = padded(M::kHidden) / 8, kInnerChunks = padded(M::kInner) / 8;
  __host__ __device__ static constexpr int four_bit_bytes(int columns) {
    // The last row's step may end behind the scales, where these are few.
    const int read = (2 * kTileRows - 1) * (columns / 2) + padded(columns) / 2;
    const int bytes = 2 * kTileRows * (columns / 2 + columns / 32);
    return bytes > read ? bytes : read;
  }
  static constexpr int kStageBytes = rounded_up(
      at_least(at_least(M::kQkvItemRows * kHiddenRow, M::kOutItemRows * kAttendedRow) - kPad,
               at_least(four_bit_bytes(M::kHidden), four_bit_bytes(M::kInner))),
      128);
  // Units of history in an item: one for each warp of a team at most.
  static constexpr int kUnitBytes = kUnit * kHeadDim * 2;  // of keys, and of values
  static constexpr int kItemUnits = at_most(M::kTeamWarps, kStageBytes / (2 * kUnitBytes));
  static_assert(kItemUnits >= 1);
  // Activations of a phase; in attention, the parts of pairs of warps: [pairs][kGroup][kHeadDim], two numbers a head;
  // then those of slices of kHeadDim threads.
  static constexpr int kHeadPart = kHeadDim + 2;  // of a head: sum of values, largest score, sum of weights
  static constexpr int kSlices = M::kMultiplying / kHeadDim;
  static constexpr int kScratch = (M::kWarps / 2 * kGroup + kSlices) * kHeadPart * 4;
  static constexpr int kActivations = rounded_up(
      at_least(at_least(at_least(kHiddenRow, 2 * padded(M::kHidden)), kAttendedRow),
               at_least(kChosen * 2 * padded(M::kInner), kScratch)),
      128);
  static constexpr int kPartBytes = kTeams * kParts * M::kTeamWarps * 16 * 4;
  static constexpr int kSmall = rounded_up(  // Small below
      3136 + kMostLayers * static_cast<int>(sizeof(Layer)) + kMostOwnExperts * M::kWarps * 4, 128);
  static constexpr int kFixed = kActivations + kPartBytes + kSmall;
  // As many for each team: a stage is always of the same one. Or a team that is ahead would ask for a round of a stage
  // whose round before, of the other team, has not come, and take its parity for an answer.
  static constexpr int kStages = at_most(12, (227 * 1024 - kFixed) / kStageBytes / kTeams * kTeams);
  // Activations come first: atoms begin at multiples of 1024.
  static constexpr int kStagesAt = kActivations, kPartsAt = kStagesAt + kStages * kStageBytes,
                       kSmallAt = kPartsAt + kPartBytes, kSharedBytes = kSmallAt + kSmall;
  static_assert(kStages >= 2 * kTeams);

  static constexpr int kMostLargest = at_least(M::steps(kChosen * kInnerChunks), M::steps(kHiddenChunks)) * M::kWarps;

  // Shared memory besides stages, activations and parts.
  struct Small {
    Layer layers[kMostLayers];
    uint4 qkv[(kGroup + 2) * kHeadDim / 8];  // of the kv head: queries, key, value
    float turns[kHeadDim];                   // cos and sin of the token's position
    uint64_t full[kStages], empty[kStages], part_full[kTeams][kParts], part_empty[kTeams][kParts];
    uint64_t routed;
    Tables tables;
    float squares[M::kWarps];
    // The largest magnitude of what each warp has; the factors of activations beside mxfp4 (TokenScale).
    uint32_t largest[kMostLargest];
    float up_factor, down_factors[kChosen];
    float logits[kMostOwnExperts][M::kWarps];  // parts of the warps
    float new_score[kGroup], sinks[kGroup];
    float y[kChosen][M::kOwnRows];  // outputs of the chosen experts, before they are added up
    float stream[M::kOwnRows];      // the residual stream, this block's rows
    int chosen[kChosen];
    float weights[kChosen];  // of the chosen experts
  };
  static_assert(sizeof(Small) <= kSmall);

  // What blocks write for each other, in memory, twice: layers take turns. Offsets in bytes, the same for all models.
  struct Exchange {
    static constexpr int kQkv = 0, kAttended = kQkv + rounded_up(M::kQkvRows * 2, 128),
                         kMiddle = kAttended + rounded_up(M::kAttended * 2, 128),
                         kLogits = kMiddle + rounded_up(M::kHidden * 2, 128),
                         kAct = kLogits + kMostExperts * 4,
                         kEnd = kAct + rounded_up(kChosen * M::kInner * 2, 128),
                         kHeadParts = kEnd + rounded_up(M::kHidden * 2, 128),
                         kBytes = kHeadParts + rounded_up(M::kBlocks * kGroup * kHeadPart * 4, 128);
  };
  static constexpr int kExchangeAt = kCounterBytes, kMarksAt = kExchangeAt + 2 * Exchange::kBytes;
};

// What a timeline build notes of each layer, in this order: clocks of the block's first thread.
enum Mark { kBegun, kNormed, kQkvDone, kQkvThere, kAttentionDone, kAttentionThere, kOutDone, kNormedAgain, kRouted, kUpDone, kUpThere, kDownDone, kMarks };

struct Share {
  int begin, end;
  __device__ int size() const { return end - begin; }
};

// Part `number` of `parts` of `total`, in contiguous runs that differ by one at most.
__device__ __forceinline__ Share share_of(int total, int number, int parts) {
  return {total * number / parts, total * (number + 1) / parts};
}

// The row of a tile that is row g of a product: rows g and g + 1 (g even) then lie 64 bytes mod 128 apart.
__device__ __forceinline__ int tile_row(int g) { return ((g & 3) == 1 || (g & 3) == 2) ? g ^ 3 : g; }

}  // namespace rose::layers
