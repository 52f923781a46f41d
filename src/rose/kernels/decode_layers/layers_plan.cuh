// All blocks of gpt-oss for a step of one token, in one launch: sizes, shares of the work, shared memory.
//
// The grid is resident as a whole, a block per multiprocessor. Weights do not depend on what is computed, so that each
// block streams its share of every matrix through one ring of stages without a pause, in the order of the model, while
// grid-wide barriers order the phases that exchange activations. Only the experts' weights wait for the router.
//
// A layer is five phases: qkv | attention | out | norm, router, gate_up | down. Each is followed by a grid barrier.
#pragma once

#include "../moe_experts/decode_call.cuh"

namespace rose::layers {

constexpr int kHeadDim = 64;
constexpr int kChosen = 4;
constexpr int kGroup = 8;       // query heads of a kv head: the rows of a product in attention
constexpr int kTeams = 2;       // of warps that multiply; they take turns at the items of the ring (two: no more, no fewer)
constexpr int kParts = 2;       // buffers of partial sums of each team
constexpr int kTileRows = 8;    // of mxfp4; an item has two tiles
enum Phase { kQkv, kAttend, kOut, kUp, kDown, kPhases };
constexpr int kMostLayers = 36;
constexpr int kMostKvHeads = 8;
constexpr int kPad = 64;        // bytes between rows of bf16 in shared memory, so that two rows meet different banks

constexpr int at_least(int a, int b) { return a > b ? a : b; }
constexpr int rounded_up(int v, int to) { return (v + to - 1) / to * to; }

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

template <int kHidden_, int kInner_, int kQueryHeads_, int kKvHeads_, int kTeamWarps_, int kCluster_, int kClusters_>
struct Model {
  static constexpr int kHidden = kHidden_, kInner = kInner_, kQueryHeads = kQueryHeads_, kKvHeads = kKvHeads_;
  static constexpr int kTeamWarps = kTeamWarps_, kCluster = kCluster_, kClusters = kClusters_;
  static constexpr int kBlocks = kCluster * kClusters;
  static constexpr int kWarps = kTeams * kTeamWarps, kMultiplying = kWarps * 32;
  // Warps that multiply, and a warpgroup of those that do not: one per team that finishes its items, one that loads.
  static constexpr int kThreads = kMultiplying + 128;
  // A block is given 96 registers for each of its 640 threads; what the roles take must not add up to more.
  static constexpr int kMultiplyRegisters = 104, kOtherRegisters = 64;
  static constexpr int kQkvRows = (kQueryHeads + 2 * kKvHeads) * kHeadDim, kAttended = kQueryHeads * kHeadDim;
  // An item fills a stage: rows of bf16, or 16 rows of mxfp4.
  static constexpr int kQkvItemRows = 4, kOutItemRows = 3;
  static constexpr int kQkvItems = kQkvRows / kQkvItemRows, kOutItems = kHidden / kOutItemRows;
  static constexpr int kUpItems = 2 * kInner / (2 * kTileRows);  // of one expert
  static constexpr int kDownGroups = kHidden / kTileRows;        // of one block for all experts: it adds them up
  static constexpr int kMostGroups = (kDownGroups + kBlocks - 1) / kBlocks;
  static constexpr int kMostRows = kMostGroups * kTileRows;
  static_assert(kQueryHeads == kGroup * kKvHeads && kGroup % kCluster == 0 && kHidden % 64 == 0 && kInner % 64 == 0);
  static_assert(kQkvRows % kQkvItemRows == 0 && kHidden % kOutItemRows == 0);
  // Each team of each block has an item of qkv and one of gate_up: its finisher builds on having waited for them.
  static_assert(kQkvItems >= kTeams * kBlocks && kChosen * kUpItems >= kTeams * kBlocks);
  static_assert(kMultiplying % 128 == 0);
};

template <class M, int kExperts_>
struct Plan : M {
  static constexpr int kExperts = kExperts_;
  // A kv head has kSplit blocks in a layer that sees everything, one where a window is seen.
  static constexpr int kSplit = M::kBlocks / M::kKvHeads;
  static_assert(kSplit >= 1 && M::kKvHeads <= kMostKvHeads);

  static constexpr int kHiddenRow = M::kHidden * 2 + kPad, kAttendedRow = M::kAttended * 2 + kPad;
  // Rows of activations beside mxfp4 lie 32 bytes mod 128 apart.
  __host__ __device__ static constexpr int four_bit_row(int columns) { return (columns / 8 + ((2 - columns / 8) & 7)) * 16; }
  static constexpr int kUpRow = four_bit_row(M::kHidden), kDownRow = four_bit_row(M::kInner);
  __host__ __device__ static constexpr int four_bit_bytes(int columns) { return 2 * kTileRows * (columns / 2 + columns / 32); }
  static constexpr int kStageBytes = rounded_up(
      at_least(at_least(M::kQkvItemRows * kHiddenRow, M::kOutItemRows * kAttendedRow),
               at_least(four_bit_bytes(M::kHidden), four_bit_bytes(M::kInner))),
      128);
  // Activations of a phase; in attention, the warps' parts: [warps][kGroup][kHeadDim] and two numbers a head.
  static constexpr int kScratch = M::kWarps * kGroup * (kHeadDim + 2) * 4;
  static constexpr int kActivations = rounded_up(
      at_least(at_least(at_least(kHiddenRow, kUpRow), kAttendedRow), at_least(kChosen * kDownRow, kScratch)),
      128);
  static constexpr int kPartBytes = kTeams * kParts * M::kTeamWarps * 16 * 4;
  static constexpr int kLogits = M::kCluster * kExperts * 4;  // of the router, from the cluster
  static constexpr int kSmall = 2560 + rounded_up(kMostLayers * static_cast<int>(sizeof(Layer)), 128);  // Small below
  static constexpr int kFixed = kActivations + kPartBytes + kLogits + kSmall;
  // As many for each team: a stage is always of the same one. Or a team that is ahead would ask for a round of a stage
  // whose round before, of the other team, has not come, and take its parity for an answer.
  static constexpr int kStages = (227 * 1024 - kFixed) / kStageBytes / kTeams * kTeams;
  static constexpr int kActivationsAt = kStages * kStageBytes, kPartsAt = kActivationsAt + kActivations,
                       kLogitsAt = kPartsAt + kPartBytes, kSmallAt = kLogitsAt + kLogits, kSharedBytes = kSmallAt + kSmall;
  static_assert(kStages >= 2 * kTeams);

  // Shared memory besides stages, activations and parts.
  struct Small {
    Layer layers[kMostLayers];
    float turns[kHeadDim];  // cos and sin of the token's position
    uint64_t full[kStages], empty[kStages], part_full[kTeams][kParts], part_empty[kTeams][kParts];
    uint64_t routed, logits_in;
    float squares[M::kWarps];
    float new_score[kGroup];
    int is_last;  // block of its kv head to have attended
    float y[kChosen][M::kMostRows];  // outputs of the chosen experts, before they are added up
    int chosen[kChosen];
    float weights[kChosen];  // of the chosen experts
  };
  static_assert(sizeof(Small) <= kSmall);

  // What all blocks write and read, in memory: Counters, then activations.
  static constexpr int kCounters = (kPhases + 1 + kMostKvHeads) * 128;
  static constexpr int kHeadPart = kHeadDim + 2;  // of a head: sum of values, largest score, sum of weights
  static constexpr int kQkvAt = kCounters, kAttendedAt = kQkvAt + rounded_up(M::kQkvRows * 2, 128),
                       kActAt = kAttendedAt + rounded_up(M::kAttended * 2, 128),
                       kHeadPartsAt = kActAt + rounded_up(kChosen * M::kInner * 2, 128),
                       kMarksAt = kHeadPartsAt + M::kKvHeads * kSplit * kGroup * kHeadPart * 4;
};

struct alignas(128) Counter {
  int value;
};
struct Counters {
  // At the grid barrier after each phase, since the launch. One each: a block that has nothing to do in a phase arrives
  // before others have passed the one before.
  Counter arrived[kPhases];
  Counter left;  // blocks that are through
  Counter attended[kMostKvHeads];  // blocks of a kv head that have attended, in this layer
};

// What a timeline build notes of each layer, in this order: clocks of the block's first thread.
enum Mark { kBegun, kNormed, kQkvDone, kQkvThere, kAttentionDone, kAttentionThere, kOutBegun, kOutDone, kOutThere, kRouted, kUpDone, kUpThere, kDownBegun, kDownDone, kMarks };

struct Share {
  int begin, end;
  __device__ int size() const { return end - begin; }
};

// A block's part of `total`, in contiguous runs that differ by one at most.
template <class M>
__device__ __forceinline__ Share share_of(int total) {
  return {total * static_cast<int>(blockIdx.x) / M::kBlocks, total * (static_cast<int>(blockIdx.x) + 1) / M::kBlocks};
}

// The row of a tile that is row g of a product: rows g and g + 1 (g even) then lie 64 bytes mod 128 apart.
__device__ __forceinline__ int tile_row(int g) { return ((g & 3) == 1 || (g & 3) == 2) ? g ^ 3 : g; }

}  // namespace rose::layers
