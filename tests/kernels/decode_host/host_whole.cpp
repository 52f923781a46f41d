// Runs the kernels of whole.cuh on a CPU. Its blocks wait for each other, so each is a process of its own; what they
// write lies in memory that they share.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "decode_stream.cuh"

namespace rose::moe_decode {
alignas(128) uint8_t shared[512 << 10];
}

#include "whole.cuh"

using namespace rose::moe_decode;

template <class T>
struct SharedCopy {
  T* there;
  T* here;
  size_t bytes;
  SharedCopy(T* from, size_t count) : there(from), bytes(count * sizeof(T)) {
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) std::abort();
    here = static_cast<T*>(found);
    std::memcpy(here, there, bytes);
  }
  ~SharedCopy() {
    std::memcpy(there, here, bytes);
    munmap(here, bytes);
  }
};

template <class Kernel>
void run_threads(int threads, int number, int blocks, Kernel kernel) {
  Block state(threads);
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([=, &state] {
      block = &state;
      threadIdx.x = i, blockIdx.x = number, gridDim.x = blocks;
      kernel();
    });
  }
  for (auto& t : running) t.join();
}

template <int kTiles, int kColumns>
int run(WholeCall call, int blocks) {
  constexpr int kWarps = 8;
  const Call& up = call.gate_up;
  SharedCopy act(up.act, size_t(up.pairs) * up.columns), y(call.down.y, size_t(up.pairs) * up.columns);
  SharedCopy written(call.written, most_hits(up, 8 * kTiles));
  call.gate_up.act = act.here, call.down.x = act.here, call.down.y = y.here, call.written = written.here;
  const size_t bytes = Layout::make<false, kWarps, kTiles>(up).total;
  std::vector<pid_t> children;
  for (int b = 0; b < blocks; ++b) {
    const pid_t child = fork();
    if (child < 0) return 2;
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    std::memset(shared, 0xFF, sizeof shared);  // NaN everywhere
    run_threads(kWarps * 32 + 32, b, blocks, [&] { whole_kernel<kWarps, kTiles, kColumns>(call); });
    bool is_clean = true;
    for (size_t i = bytes; i < sizeof shared; ++i) is_clean &= shared[i] == 0xFF;
    _exit(is_clean ? 0 : 1);
  }
  int failed = 0;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed |= status;
  }
  return failed;
}

int run_whole(const WholeCall& call, int width, int blocks, bool, void*) {
  const int columns = call.gate_up.columns;
  if (columns == 96 && width == 8) return run<1, 96>(call, blocks);
  if (columns == 96 && width == 16) return run<2, 96>(call, blocks);
  if (width == 8) return run<1, 0>(call, blocks);
  if (width == 16) return run<2, 0>(call, blocks);
  return 1;
}

int run_sum(const Sum& sum, int blocks, bool, void*) {
  for (int b = 0; b < blocks; ++b) run_threads(kSumThreads, b, blocks, [&] { sum_kernel(sum); });
  return 0;
}

using cudaStream_t = void*;
#include "whole_launchers.cuh"
