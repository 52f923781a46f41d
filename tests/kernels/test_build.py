"""The compiler cache: what names an object, what is refused, and that errors carry words."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.kernels import build
from rose.kernels.build import BuildError, CudaLibrary, LaunchError, disassemble, find_cuobjdump

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")

SOURCE = """
#include "launch.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
using namespace rose;

__global__ void __launch_bounds__(128, 1) product(float* out, __grid_constant__ const CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t barrier;
  uint32_t tile = shared_address(shared);
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&barrier), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(shared_address(&barrier), 8192);
    tma_load_2d(tile, &map, shared_address(&barrier), 0, 0);
  }
  __syncthreads();
  mbarrier_wait(shared_address(&barrier), 0);
  float d[32];
  wgmma_fence();
  wgmma_bf16<64>(d, descriptor_swizzle128(tile), descriptor_swizzle128(tile), 0);
  wgmma_commit();
  wgmma_wait<0>();
  settle(d);
  for (int i = 0; i < 32; ++i) out[i * 128 + threadIdx.x] = d[i];
}

extern "C" int launch_product(float* out, int wrong, cudaStream_t stream) {
  if (wrong) return cudaErrorInvalidValue;
  CUtensorMap map{};
  product<<<1, 128, 8192, stream>>>(out, map);
  return cudaGetLastError();
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    folder = tmp_path_factory.mktemp("build")
    (folder / "kernel_sm90.cu").write_text(SOURCE)
    return CudaLibrary(folder / "kernel_sm90.cu", cache=folder / "cache")


@needs_nvcc
def test_an_object_is_compiled_once(library: CudaLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library.build()
    assert "registers" in first.log
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    again = CudaLibrary(library.source, cache=library.cache)
    assert again.refusal() is None
    assert again.build() == first


@needs_nvcc
def test_headers_compile_to_hopper_instructions(library: CudaLibrary) -> None:
    if find_cuobjdump() is None:
        pytest.skip("cuobjdump is not installed")
    code = disassemble(library.build().path)
    assert "HGMMA" in code
    assert "UTMALDG" in code


@needs_nvcc
def test_a_launchers_error_carries_cudas_words(library: CudaLibrary) -> None:
    launch = library.launcher("launch_product", "pip")
    with pytest.raises(LaunchError, match=r"launch_product: CUDA error 1 \(invalid argument\)"):
        launch(0, 1, 0)


@needs_nvcc
def test_a_rejected_source_raises_with_the_compilers_words(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text("int x = undeclared;")
    with pytest.raises(BuildError, match="undeclared"):
        CudaLibrary(tmp_path / "bad.cu", cache=tmp_path / "cache").build()
    assert not list((tmp_path / "cache").glob("*.so"))


def test_key_follows_source_headers_flags_and_architecture(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/first.cuh").write_text('#include "../part.cuh"\n#include <cstdint>\n')
    (tmp_path / "part.cuh").write_text("// none yet")
    source.write_text('#include "deep/first.cuh"\n#include "mbarrier.cuh"\n// one')
    keys = {CudaLibrary(source).key(), CudaLibrary(source, defines=["A=1"]).key()}
    keys.add(CudaLibrary(source, arch="100a").key())
    (tmp_path / "part.cuh").write_text("// header")
    keys.add(CudaLibrary(source).key())
    source.write_text('#include "deep/first.cuh"\n// two')
    keys.add(CudaLibrary(source).key())
    assert len(keys) == 5
    assert CudaLibrary(source).key() in keys
    (tmp_path / "beside.cuh").write_text("// nobody includes it")
    assert CudaLibrary(source).key() in keys
    (tmp_path / "part.cuh").unlink()
    with pytest.raises(BuildError, match=r"first\.cuh includes '\.\./part\.cuh'"):
        CudaLibrary(source).key()


def test_words_for_all_make_builds_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("")
    plain = CudaLibrary(source).key()
    monkeypatch.setattr(build, "_defines_of_all", [])
    build.define_in_all(["ROSE_WATCHDOG", "ROSE_RACECHECK"])
    assert CudaLibrary(source).flags[-2:] == ("-DROSE_WATCHDOG", "-DROSE_RACECHECK")
    assert CudaLibrary(source).key() != plain


def test_absent_compiler_is_refused_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel.cu").write_text("")
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    library = CudaLibrary(tmp_path / "kernel.cu", cache=tmp_path / "cache")
    assert "nvcc is not on PATH" in str(library.refusal())
    with pytest.raises(BuildError, match="install the CUDA toolkit"):
        library.build()
