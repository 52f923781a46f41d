"""What the compiler made of the Hopper kernel: right instructions, no spills worth a name, no serialised products."""

from __future__ import annotations

import re

import pytest

from rose.kernels import registry
from rose.kernels.build import CudaLibrary, LaunchError, disassemble, find_cuobjdump, find_nvcc

registry.load("attention_prefill")
from rose.kernels.attention_prefill import cuda_impl  # noqa: E402

BOUND = cuda_impl.BOUND
pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed")


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    """What is bound; compiled on the first run, then taken from the user's cache."""
    return cuda_impl.variant_library(BOUND)


def test_compiler_kept_registers_and_pipelines(library: CudaLibrary) -> None:
    log = library.build().log
    assert log.count("Compiling entry function") == len(BOUND)
    assert "Potential Performance Loss" not in log, "wgmma serialised (C7510..C7512)"
    assert "C7508" not in log, "setmaxnreg ignored"
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill loads", log)) <= 24


def functions(code: str) -> list[str]:
    """Split a disassembly by kernel."""
    return re.split(r"\n\s*Function : ", code)[1:]


def test_narrow_windows_alone_get_the_kernel_that_holds_three_tiles() -> None:
    """The kernel refuses wider ones; here is where the limit is written twice."""
    header = (cuda_impl.SOURCE.parent / "items.cuh").read_text()
    tiles, rows = (int(re.findall(rf"{n} = (\d+);", header)[0]) for n in ("kWindowTiles", "kRows"))
    assert (tiles - 1) * rows + 1 == cuda_impl.MAX_WINDOW
    variants = [cuda_impl.bound_variant(w) for w in (None, 1, 129, 130)]
    assert variants == [38, 40, 40, 38]


@pytest.mark.skipif(find_cuobjdump() is None, reason="cuobjdump is not installed")
def test_second_product_overlaps_the_softmax(library: CudaLibrary) -> None:
    """In the loop over tiles the wait for P V comes after the exponentials (a scheduler may move it)."""
    kernels = functions(disassemble(library.build().path))
    assert len(kernels) == len(BOUND)
    assert all("UTMALDG" in kernel and "USETMAXREG" in kernel for kernel in kernels)
    walking = [k for k in kernels if not k.split("\n")[0].count("attention_prefill_window")]
    assert len(walking) == len(BOUND) - 1
    for kernel in walking:
        consumers = kernel[: kernel.rindex("HGMMA")]
        assert not re.search(r"\b(STL|LDL)\b", consumers), "only the producer may spill"
        words = re.findall(r"HGMMA\.64x\d+|MUFU\.EX2|DEPBAR\.LE gsb0, 0x[01]", kernel)
        text = " ".join(words)
        widths = [int(n) for n in re.findall(r"HGMMA\.64x(\d+)", text)]
        keys = widths[0]
        scores, output = f"HGMMA.64x{keys} " * 4, "HGMMA.64x64 " * (keys // 16)
        loop = text.split(scores + output + "DEPBAR.LE gsb0, 0x1 ")
        assert len(loop) == 2, "no loop of scores and output issued together"
        exponentials = loop[1].split("DEPBAR.LE gsb0, 0x0")[0].count("MUFU.EX2")
        assert exponentials >= keys // 2 * 3 // 4


def test_launcher_reads_what_pack_call_writes(library: CudaLibrary) -> None:
    """No GPU is needed to be refused: the order of fields is that of `Call` in the source."""
    launch = library.launcher("launch_attention_prefill", "p")
    values = dict.fromkeys(CALL_FIELDS, 0) | {"num_sequences": 1, "page_tokens": 64, "scale": 1.0}
    launch(cuda_impl.CALL.pack(*values.values()))  # no tokens: nothing to do
    for wrong in ({"page_tokens": 65}, {"num_sequences": 0}, {"num_sequences": 2049}):
        with pytest.raises(LaunchError, match="invalid argument"):
            launch(cuda_impl.CALL.pack(*(values | {"num_tokens": 1} | wrong).values()))


CALL_FIELDS = re.findall(
    r"\b(\w+)(?=[,;])",
    re.sub(r"//.*", "", cuda_impl.SOURCE.read_text().split("struct Call {")[1].split("};")[0]),
)
