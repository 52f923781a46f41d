// Runs sort_pairs_in_cluster of prefill_rows.cuh on threads of a CPU; decode_host/launch.cuh has them. The test puts
// the kernel into sort.cuh, with its shared arrays as `Space` and fewer warps.
#include "launch.cuh"

#define __cluster_dims__(...)

struct Space;
struct Cluster {
  std::barrier<> all;
  std::vector<std::unique_ptr<Space>> spaces;
};
thread_local Cluster* cluster;
thread_local Space* space;
thread_local uint32_t my_rank;

uint32_t cluster_rank() { return my_rank; }
void cluster_sync() { cluster->all.arrive_and_wait(); }
int load_remote(const int* pointer, uint32_t rank) {
  const auto offset = reinterpret_cast<const uint8_t*>(pointer) - reinterpret_cast<const uint8_t*>(space);
  return *reinterpret_cast<const int*>(reinterpret_cast<const uint8_t*>(cluster->spaces[rank].get()) + offset);
}

#include "sort.cuh"

extern "C" int launch_sort(const int* ids, int num_pairs, int num_experts, int tile_rows, int* row_of_pair, int* starts,
                           int* tiles, int* expert_of_tile, void*) {
  constexpr int kThreads = kSortWarps * 32;
  Cluster state{std::barrier<>(kThreads * kSortBlocks), {}};
  std::vector<std::unique_ptr<Block>> blocks;
  for (int rank = 0; rank < kSortBlocks; ++rank) {
    state.spaces.push_back(std::make_unique<Space>());
    std::memset(state.spaces.back().get(), 0x55, sizeof(Space));
    blocks.push_back(std::make_unique<Block>(kThreads));
  }
  std::vector<std::thread> running;
  for (int i = 0; i < kThreads * kSortBlocks; ++i) {
    running.emplace_back([&, i] {
      my_rank = i / kThreads, threadIdx.x = i % kThreads;
      cluster = &state, space = state.spaces[my_rank].get(), block = blocks[my_rank].get();
      sort_pairs_in_cluster(ids, num_pairs, num_experts, tile_rows, row_of_pair, starts, tiles, expert_of_tile);
    });
  }
  for (auto& t : running) t.join();
  return 0;
}
