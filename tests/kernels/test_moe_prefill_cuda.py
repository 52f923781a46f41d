"""The CUDA experts for many tokens, as far as a machine without a GPU can tell: code, signatures, index logic."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from moe_model import FOLDER, declared_by, passed_by

from rose.kernels import build, registry
from rose.kernels.formats import FP8_BLOCK, MXFP4, FormattedTensor
from rose.kernels.moe_experts.mxfp4_tiles import multipliers, tile_exponents
from rose.quant.fp8 import from_mxfp4
from rose.utils.device import DeviceFacts

H200 = DeviceFacts(kind="cuda", name="NVIDIA H200", capability=(9, 0), num_sms=132)
needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")


def test_python_passes_what_the_launchers_take() -> None:
    assert passed_by("cuda_fused") == declared_by(FOLDER / "prefill_fused_sm90.cu")


@pytest.mark.parametrize(("experts", "weight", "wanted"), [
    (32, "fp8_block", ["cuda_fused", "cuda_fused"]),
    (32, "mxfp4", ["cuda_fused_copy", "cuda_fused_copy"]),
    (128, "mxfp4", ["cuda_swapped", "cuda_wide"]),
])  # fmt: skip
@needs_nvcc
def test_hopper_binds_them_for_prefill(experts: int, weight: str, wanted: list[str]) -> None:
    bound = registry.bind(
        "moe_experts",
        formats={"activation": "bf16", "weight": weight},
        sizes={"D": 2880, "I": 2880, "E": experts, "K": 4},
        device=H200,
    )
    assert [i.name for r, i in bound.table.items() if r.phase == "prefill"] == wanted


def drawn(low: int, high: int) -> FormattedTensor:
    generator = torch.Generator().manual_seed(5)
    shape = (9, 160, 6)
    values = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
    values[0, :128, :4] = 0x80  # a tile of zeros, some of them negative
    return FormattedTensor(format=MXFP4, values=values, scales=scales)


def permuted(low: int, high: int, selector: int) -> int:
    """What PRMT does: four bytes picked from eight; a selector's top bit replicates the sign."""
    source = [(low >> 8 * i) & 255 for i in range(4)] + [(high >> 8 * i) & 255 for i in range(4)]
    out = 0
    for i in range(4):
        nibble = (selector >> 4 * i) & 15
        byte = source[nibble & 7]
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << 8 * i
    return out


def expanded(matrix: FormattedTensor, exponents: torch.Tensor) -> torch.Tensor:
    """`expand_mxfp4` of prefill_permute.cuh, thread by thread."""
    assert matrix.scales is not None
    _, rows, columns = matrix.shape
    codes = matrix.values.reshape(-1, 8)
    scales = matrix.scales.reshape(-1)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    tables: dict[int, list[int]] = {}
    out = []
    for index in range(codes.shape[0]):
        row, column = divmod(index * 16, columns)
        expert, row = divmod(row, rows)
        shift = int(scales[index // 2]) - int(exponents[expert, row // 128, column // 128])
        shift = max(min(shift, 9), -40)
        if shift not in tables:
            scaled = (magnitudes * 2.0**shift).clamp(-448, 448).to(torch.float8_e4m3fn)
            tables[shift] = [int.from_bytes(bytes(scaled.view(torch.uint8)[i : i + 4].tolist()), "little")
                             for i in (0, 4)]  # fmt: skip
        low, high = tables[shift]
        packed = codes[index].tolist()
        for i in range(4):
            word = packed[2 * i] | packed[2 * i + 1] << 8
            sign = (permuted(0x80808080, 0x80808080, word) << 1) & 0x80808080
            out += (permuted(low, high, word & 0x7777) | sign).to_bytes(4, "little")
    return torch.tensor(out, dtype=torch.uint8).view(matrix.shape)


def test_sign_replication_does_not_go_through_the_masking_intrinsic() -> None:
    # nvcc clears the top bit of each selector of __byte_perm.
    source = (FOLDER / "prefill_permute.cuh").read_text()
    code = source[source.index("__global__ void expand_mxfp4") :]
    assert "__byte_perm(" not in code


def test_tile_exponents_are_those_of_the_converter() -> None:
    for low, high in ((120, 135), (0, 256), (90, 91)):
        matrix = drawn(low, high)
        ours = multipliers(tile_exponents(matrix))
        wanted = from_mxfp4(matrix).scales
        assert wanted is not None
        normal = wanted >= 2.0**-126
        assert torch.equal(ours[normal], wanted[normal])


def test_expansion_by_byte_permutation_is_exact() -> None:
    matrix = drawn(113, 127)
    matrix = FormattedTensor(
        format=MXFP4,
        values=matrix.values[:2].contiguous(),
        scales=matrix.scales[:2].contiguous(),  # type: ignore[index]
    )
    exponents = tile_exponents(matrix)
    values = expanded(matrix, exponents).view(torch.float8_e4m3fn)
    fp8 = FormattedTensor(format=FP8_BLOCK, values=values, scales=multipliers(exponents))
    assert torch.equal(fp8.to_float(), matrix.to_float())


def transposed(words: list[list[int]]) -> list[list[int]]:
    """`transpose_quad`: two rounds of exchanges between the lanes of a quad."""
    words = [list(w) for w in words]
    for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        for first, second in pairs:
            sent = [words[q][first] if q & bit else words[q][second] for q in range(4)]
            for q in range(4):
                words[q][first if q & bit else second] = sent[q ^ bit]
    return words


def test_epilogues_put_neighbouring_columns_into_one_lane() -> None:
    # Down: word i of lane q is columns 8i + 2q and the next.
    lanes = transposed([[8 * i + 2 * q for i in range(4)] for q in range(4)])
    assert lanes == [[8 * q + 2 * p for p in range(4)] for q in range(4)]
    # Gate-up: byte i of word t of lane q is channel 4 (4t + i) + q.
    packed = [
        [sum((4 * (4 * t + i) + q) << 8 * i for i in range(4)) for t in range(4)] for q in range(4)
    ]
    channels = []
    for w in transposed(packed):
        low01, low23 = permuted(w[0], w[1], 0x5140), permuted(w[2], w[3], 0x5140)
        high01, high23 = permuted(w[0], w[1], 0x7362), permuted(w[2], w[3], 0x7362)
        for a, b in ((low01, low23), (high01, high23)):
            channels += permuted(a, b, 0x5410).to_bytes(4, "little")
            channels += permuted(a, b, 0x7632).to_bytes(4, "little")
    assert channels == list(range(64))
