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

// Eight codes as the products take them, of a block so many powers of two below the largest.
extern "C" void expand_codes(uint32_t codes, int below, float* found) {
  Tables tables;
  for (threadIdx.x = 0; threadIdx.x < kTables; ++threadIdx.x) store_tables(tables);
  uint32_t words[2];
  expand_word(codes, tables.bytes[below], tables.ones, words[0], words[1]);
  for (int i = 0; i < 8; ++i) found[i] = moe_decode::value_of_e4m3(words[i / 4] >> 8 * (i % 4) & 255);
}

// Eight bf16 of a token whose largest magnitude has these bits, as the sums of their two parts, scaled back.
extern "C" void split_chunk(const uint16_t* x, int largest, float* found) {
  uint4 chunk;
  std::memcpy(&chunk, x, sizeof chunk);
  uint8_t atom[1024];
  const TokenScale token(largest);
  put_split(atom, 0, chunk, token.scale);
  for (int i = 0; i < 8; ++i) {
    const int u = i / 4;
    const float nearest = moe_decode::value_of_e4m3(atom[16 * u + i % 4]);
    const float rest = moe_decode::value_of_e4m3(atom[128 + 16 * (1 - u) + i % 4]);
    found[i] = (nearest + rest) * token.factor * (1 << kTop);
  }
}

int workspace_bytes() { return AnyPlan::kMarksAt; }

using cudaStream_t = void*;
#include "layers_launchers.cuh"
