// Runs the kernel of layers.cuh on a CPU: all blocks at once, for they wait for each other, a std::thread per thread.
#include "layers.cuh"

using namespace rose;
using namespace rose::layers;

// Small, and in all that matters of another shape than the published one: shares that are not even, columns that end
// inside a step of the products, more groups of rows per block.
using Small = Model<192, 128, 16, 2, 4, 6>;
using AnyPlan = Plan<Small, 32>;

template <int kExperts>
int run(const Call& call) {
  using P = Plan<Small, kExperts>;
  constexpr int kBytes = P::kSharedBytes;
  std::vector<Memory> memories(P::kBlocks);
  std::vector<std::unique_ptr<::Block>> states;
  for (int b = 0; b < P::kBlocks; ++b) {
    Memory& m = memories[b];
    m.bytes.assign(kBytes + 4096, 0xFF);  // NaN everywhere
    m.base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(m.bytes.data()) + 1023) / 1024 * 1024);
    states.push_back(std::make_unique<::Block>(P::kThreads));
  }
  std::vector<std::thread> running;
  for (int b = 0; b < P::kBlocks; ++b) {
    for (int i = 0; i < P::kThreads; ++i) {
      running.emplace_back([&, b, i] {
        ::block = states[b].get(), memory = &memories[b];
        threadIdx.x = i, blockIdx.x = b;
        layers_kernel<P>(call);
      });
    }
  }
  for (auto& t : running) t.join();
  for (Memory& m : memories) {
    for (uint8_t* p = m.base + kBytes; p < m.bytes.data() + m.bytes.size(); ++p) {
      if (*p != 0xFF) return 1;
    }
  }
  return 0;
}

int dispatch(const Call& call, int experts, void*) {
  if (experts == 32) return run<32>(call);
  if (experts == 64) return run<64>(call);
  return 1;
}

int workspace_bytes() { return AnyPlan::kMarksAt; }

using cudaStream_t = void*;
#include "layers_launchers.cuh"
