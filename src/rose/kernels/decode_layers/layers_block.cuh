// A block as its roles see it: shared memory, barriers, where an item of the ring lies.
#pragma once

#include "layers_plan.cuh"
#include "layers_ptx.cuh"

namespace rose::layers {

// The halves of a pair of bf16; what a number is in bf16.
__device__ __forceinline__ float low(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(uint32_t v) { return __uint_as_float(v & 0xFFFF0000u); }
__device__ __forceinline__ float rounded(float v) { return __bfloat162float(__float2bfloat16(v)); }

// What was received has been written; of what was not asked for it does not matter.
__device__ __forceinline__ bool is_written(uint32_t v) { return v != kEmpty; }
__device__ __forceinline__ bool is_written(const uint2& v) { return is_written(v.x) && is_written(v.y); }
__device__ __forceinline__ bool is_written(const uint4& v) {
  return is_written(v.x) && is_written(v.y) && is_written(v.z) && is_written(v.w);
}

constexpr uint32_t kMultiplyBarrier = 1, kFinishBarrier = 2;  // 0 is __syncthreads

// How far a team has come in the ring and in its buffers of parts. Teams take turns at the items of the block, whatever
// phase they are of, so that item after item of a team lies two stages further.
template <class P>
struct Turn {
  int stage;
  uint32_t parity = 0;
  int buffer = 0;
  uint32_t part_parity = 0;

  __device__ explicit Turn(int team) : stage(team) {}

  __device__ void next_stage() {
    stage += kTeams;
    if (stage >= P::kStages) stage -= P::kStages, parity ^= 1;
  }
  __device__ void next_part() {
    if (++buffer == kParts) buffer = 0, part_parity ^= 1;
  }
};

template <class P>
struct Block {
  using Small = typename P::Small;
  using Exchange = typename P::Exchange;

  const Call& call;
  int first_layer = 0;  // layers of earlier launches, up to an even number
  uint8_t* shared;
  Small& small;

  __device__ explicit Block(const Call& c)
      : call(c), shared(shared_memory()), small(*reinterpret_cast<Small*>(shared_memory() + P::kSmallAt)) {}

  __device__ uint8_t* stage(int number) const { return shared + P::kStagesAt + number * P::kStageBytes; }
  __device__ uint32_t full(int number) const { return shared_address(&small.full[number]); }
  __device__ uint32_t empty(int number) const { return shared_address(&small.empty[number]); }
  __device__ uint32_t part_full(int team, int buffer) const { return shared_address(&small.part_full[team][buffer]); }
  __device__ uint32_t part_empty(int team, int buffer) const { return shared_address(&small.part_empty[team][buffer]); }
  // [warps of the team][16 rows]
  __device__ float* parts(int team, int buffer) const {
    return reinterpret_cast<float*>(shared + P::kPartsAt) + (team * kParts + buffer) * P::kTeamWarps * 16;
  }
  __device__ uint8_t* activations() const { return shared; }

  // How many blocks have left the launches before, and so, how many layers came before.
  __device__ uint64_t* launches() const { return reinterpret_cast<uint64_t*>(call.workspace); }
  __device__ void count_layers() {
    const uint64_t before = __ldcg(reinterpret_cast<const unsigned long long*>(launches()));
    first_layer = static_cast<int>(before / P::kBlocks % 2) * call.num_layers;
  }

  // An address in the exchange of a layer, `at` one of Exchange's. Layers are counted over all launches.
  template <class T>
  __device__ T* exchange(int layer, int at) const {
    const int turn = (first_layer + layer) & 1;
    return reinterpret_cast<T*>(call.workspace + P::kExchangeAt + turn * Exchange::kBytes + at);
  }
  // Of a block's part of its kv head's attention: [kGroup][kHeadPart]
  __device__ float* head_part(int layer, int number) const {
    return exchange<float>(layer, Exchange::kHeadParts) + number * kGroup * P::kHeadPart;
  }

  // Items of a block in a phase: of qkv those of its kv head, of gate_up those of all chosen experts.
  __device__ static int kv_head() { return static_cast<int>(blockIdx.x) / P::kSplit; }
  __device__ static int part() { return static_cast<int>(blockIdx.x) % P::kSplit; }
  __device__ static Share qkv_items() { return share_of(P::kQkvItems, part(), P::kSplit); }
  __device__ static Share up_items() { return share_of(kChosen * P::kUpItems, blockIdx.x, P::kBlocks); }
  __device__ static Share experts() { return share_of(P::kExperts, blockIdx.x, P::kBlocks); }
  __device__ static int first_row() { return static_cast<int>(blockIdx.x) * P::kOwnRows; }  // of the stream
  // Among the rows of qkv the first of an item of the kv head: its queries come first, then its key, its value.
  __device__ static int qkv_row(int item) {
    constexpr int kHeadItems = kHeadDim / P::kQkvItemRows, kQueryItems = kGroup * kHeadItems;
    const int head = item < kQueryItems                ? kv_head() * kGroup
                     : item < kQueryItems + kHeadItems ? P::kQueryHeads + kv_head() - kGroup
                                                       : P::kQueryHeads + P::kKvHeads + kv_head() - kGroup - 1;
    return head * kHeadDim + item * P::kQkvItemRows;
  }

  __device__ void mark(int layer, Mark which) const {
#ifdef ROSE_TIMELINE
    if (threadIdx.x == 0) {
      int64_t* marks = reinterpret_cast<int64_t*>(call.workspace + P::kMarksAt);
      marks[(blockIdx.x * kMostLayers + layer) * kMarks + which] = nanoseconds();
    }
#endif
  }

  // Ask until it is so; a build with the watchdog traps after two seconds, as mbarrier_wait does.
  template <class Ask>
  __device__ static void wait_until(Ask is_so) {
    const int64_t begin = kWatchdog ? nanoseconds() : 0;
    while (!is_so()) {
      if (kWatchdog && nanoseconds() - begin > 2000000000) trap();
    }
  }

  // What other blocks write, as soon as all of it is there: x[i] = load(i), for those that are wanted.
  template <class T, int kCount, class IsWanted, class Load>
  __device__ static void receive(T (&x)[kCount], IsWanted is_wanted, Load load) {
    uint32_t missing = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) missing |= is_wanted(i) ? 1u << i : 0, x[i] = T{};
    wait_until([&] {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (missing >> i & 1) x[i] = load(i);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (is_written(x[i])) missing &= ~(1u << i);
      }
      return missing == 0;
    });
  }

  // What is this thread's in step s of those that multiply.
  __device__ static int place(int s) { return s * P::kMultiplying + static_cast<int>(threadIdx.x); }

  // All warps that multiply.
  __device__ static void sync_multiplying() { named_sync(kMultiplyBarrier, P::kMultiplying); }
};

}  // namespace rose::layers
