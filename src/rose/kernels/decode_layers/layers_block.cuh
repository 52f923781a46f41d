// A block as its roles see it: shared memory, barriers, where an item of the ring lies.
#pragma once

#include "layers_plan.cuh"
#include "layers_ptx.cuh"

namespace rose::layers {

// The halves of a pair of bf16; what a number is in bf16; a bf16 that another block may have written.
__device__ __forceinline__ float low(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(uint32_t v) { return __uint_as_float(v & 0xFFFF0000u); }
__device__ __forceinline__ float rounded(float v) { return __bfloat162float(__float2bfloat16(v)); }
__device__ __forceinline__ float load_bf16(const __nv_bfloat16* p) {
  return low(__ldcg(reinterpret_cast<const uint16_t*>(p)));
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

  __device__ void next() {
    stage += kTeams;
    if (stage >= P::kStages) stage -= P::kStages, parity ^= 1;
    if (++buffer == kParts) buffer = 0, part_parity ^= 1;
  }
};

template <class P>
struct Block {
  using Small = typename P::Small;

  const Call& call;
  uint8_t* shared;
  Small& small;

  __device__ explicit Block(const Call& c)
      : call(c), shared(shared_memory()), small(*reinterpret_cast<Small*>(shared_memory() + P::kSmallAt)) {}

  __device__ uint8_t* stage(int number) const { return shared + number * P::kStageBytes; }
  __device__ uint32_t full(int number) const { return shared_address(&small.full[number]); }
  __device__ uint32_t empty(int number) const { return shared_address(&small.empty[number]); }
  __device__ uint32_t part_full(int team, int buffer) const { return shared_address(&small.part_full[team][buffer]); }
  __device__ uint32_t part_empty(int team, int buffer) const { return shared_address(&small.part_empty[team][buffer]); }
  // [warps of the team][16 rows]
  __device__ float* parts(int team, int buffer) const {
    return reinterpret_cast<float*>(shared + P::kPartsAt) + (team * kParts + buffer) * P::kTeamWarps * 16;
  }
  __device__ uint8_t* activations() const { return shared + P::kActivationsAt; }

  __device__ Counters& counters() const { return *reinterpret_cast<Counters*>(call.workspace); }
  __device__ __nv_bfloat16* qkv() const { return reinterpret_cast<__nv_bfloat16*>(call.workspace + P::kQkvAt); }
  __device__ __nv_bfloat16* attended() const {
    return reinterpret_cast<__nv_bfloat16*>(call.workspace + P::kAttendedAt);
  }
  // Of a block's part of a kv head: [kGroup][kHeadPart]
  __device__ float* head_part(int kv_head, int part) const {
    return reinterpret_cast<float*>(call.workspace + P::kHeadPartsAt) + (kv_head * P::kSplit + part) * kGroup * P::kHeadPart;
  }
  __device__ __nv_bfloat16* act() const { return reinterpret_cast<__nv_bfloat16*>(call.workspace + P::kActAt); }

  // Items of a block in a phase.
  __device__ static Share qkv_items() { return share_of<P>(P::kQkvItems); }
  __device__ static Share out_items() { return share_of<P>(P::kOutItems); }
  __device__ static Share up_items() { return share_of<P>(kChosen * P::kUpItems); }
  __device__ static Share down_groups() { return share_of<P>(P::kDownGroups); }
  // Two experts each.
  __device__ static int down_items() { return down_groups().size() * kChosen / 2; }

  __device__ void mark(int layer, Mark which) const {
#ifdef ROSE_TIMELINE
    if (threadIdx.x == 0) {
      int64_t* marks = reinterpret_cast<int64_t*>(call.workspace + P::kMarksAt);
      marks[(blockIdx.x * kMostLayers + layer) * kMarks + which] = nanoseconds();
    }
#endif
  }

  // Of kTeams arrivals of this block at the barrier after a phase.
  __device__ void arrive_for_all(Phase phase, int arrivals) const {
    add_release(&counters().arrived[phase].value, arrivals);
  }

  // Ask until it is so; a build with the watchdog traps after two seconds, as mbarrier_wait does.
  template <class Ask>
  __device__ static void wait_until(Ask is_so) {
    const int64_t begin = kWatchdog ? nanoseconds() : 0;
    while (!is_so()) {
      if (kWatchdog && nanoseconds() - begin > 2000000000) trap();
    }
  }

  // Wait for everybody at the barrier after a phase. What was written before their arrival is seen by this thread, and
  // by those who meet it at a barrier of the block.
  __device__ void wait_for_all(int layer, Phase phase) const {
    const int wanted = (layer + 1) * kTeams * P::kBlocks;
    const int* arrived = &counters().arrived[phase].value;
    wait_until([&] { return load_acquire(arrived) >= wanted; });
  }

  __device__ static void wait_cluster(uint32_t barrier, uint32_t parity) {
    wait_until([&] { return try_wait_cluster(barrier, parity); });
  }

  // All warps that multiply.
  __device__ static void sync_multiplying() { named_sync(kMultiplyBarrier, P::kMultiplying); }
};

}  // namespace rose::layers
