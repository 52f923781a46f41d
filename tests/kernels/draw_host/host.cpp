// Runs the kernel of draw_cluster.cuh on threads of a CPU: one row after the other, clusters of two small blocks.
#include "draw_cluster.cuh"

using namespace rose::draw;

constexpr int kThreads = 64, kCluster = 2;

template <class T, bool kMayFilter>
void run(const Call& call, int rows) {
  using Space = Shared<kThreads, kCluster>;
  for (int row = 0; row < rows; ++row) {
    const size_t bytes = (sizeof(Space) + 15) / 16 * 16 + share_of<kCluster>(call.vocab) * sizeof(float);
    Cluster state{std::barrier<>(kThreads * kCluster), {}};
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::vector<float4>> memory(kCluster, std::vector<float4>(bytes / 16 + 1));
    for (int rank = 0; rank < kCluster; ++rank) {
      std::memset(memory[rank].data(), 0xFF, bytes);
      state.memory.push_back(reinterpret_cast<uint8_t*>(memory[rank].data()));
      blocks.push_back(std::make_unique<Block>(kThreads));
    }
    std::vector<std::thread> running;
    for (int i = 0; i < kThreads * kCluster; ++i) {
      running.emplace_back([&, i] {
        my_rank = i / kThreads, cluster = &state, block = blocks[my_rank].get(), threadIdx.x = i % kThreads;
        auto& space = *reinterpret_cast<Space*>(state.memory[my_rank]);
        float* values = reinterpret_cast<float*>(state.memory[my_rank] + (sizeof(Space) + 15) / 16 * 16);
        draw_row<T, kMayFilter, kThreads, kCluster>(call, space, values, row, my_rank);
      });
    }
    for (auto& t : running) t.join();
  }
}

extern "C" int launch_draw(const void* logits, const void* temperature, const void* top_k, const void* top_p,
                           const void* min_p, const void* seed, const void* position, void* tokens, int rows,
                           int vocab, int is_bf16, int is_filtered, int, void*) {
  const Call call = {logits,
                     static_cast<const float*>(temperature),
                     static_cast<const int*>(top_k),
                     static_cast<const float*>(top_p),
                     static_cast<const float*>(min_p),
                     static_cast<const long long*>(seed),
                     static_cast<const long long*>(position),
                     static_cast<long long*>(tokens),
                     vocab};
  if (is_bf16 && is_filtered) return run<__nv_bfloat16, true>(call, rows), 0;
  if (is_bf16) return run<__nv_bfloat16, false>(call, rows), 0;
  if (is_filtered) return run<float, true>(call, rows), 0;
  return run<float, false>(call, rows), 0;
}
