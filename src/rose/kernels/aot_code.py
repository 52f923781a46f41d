"""What the machine code of a compiled kernel shows: tensor-core instructions, spills, shared memory and its reads."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.kernels.aot_reads import late_reads
from rose.kernels.build import CudaLibrary, disassemble, find_cuobjdump
from rose.utils.errors import RoseError

MAX_SHARED_BYTES = 227 << 10
"""What one block may have on an H200."""
MATRIX_INSTRUCTIONS = ("HGMMA", "QGMMA", "HMMA", "IMMA")
_DOT = re.compile(r"\b(?:tt\.dot|tt\.dot_scaled|ttng\.warp_group_dot)\b.*(?:bf16|xf16|f8E4M3)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel as compiled."""

    operation: str
    implementation: str
    """Name of the implementation, or of the `.cu` file."""
    case: str
    """The first case that led to it; empty for CUDA sources."""
    kernel: str
    registers: int
    spill_bytes: int
    """Of stack that the kernel stores registers to; 0: nothing spilled."""
    shared_bytes: int
    """Of CUDA sources only what is declared statically."""
    has_product: bool
    """Its source multiplies matrices of a format that tensor cores take."""
    matrix_instructions: list[str] = field(default_factory=list)
    late_reads: list[str] = field(default_factory=list)
    """Reads of shared memory that are not waited for before the memory is given back (aot_reads.py), in words."""

    @property
    def name(self) -> str:
        """Where it comes from, in words."""
        return " ".join(
            filter(None, (f"{self.operation}/{self.implementation}", self.kernel, self.case))
        )

    def problems(
        self, spills: Mapping[str, tuple[int, str]], late: Mapping[str, tuple[int, str]]
    ) -> list[str]:
        """Return what is wrong; `spills`, `late`: (part of) kernel name -> (bytes or reads allowed, reason)."""
        found = []
        if self.has_product and not self.matrix_instructions:
            found.append(f"{self.name}: multiplies matrices without a tensor-core instruction")
        if self.shared_bytes > MAX_SHARED_BYTES:
            found.append(
                f"{self.name}: {self.shared_bytes} bytes of shared memory, a block may have {MAX_SHARED_BYTES}"
            )
        allowed = self._allowed(spills)
        if self.spill_bytes > allowed:
            found.append(
                f"{self.name}: spills {self.spill_bytes} bytes, {allowed} are stated; use fewer registers, or "
                "state bytes and reason in SPILLS of a module of its folder"
            )
        allowed = self._allowed(late)
        if len(self.late_reads) > allowed:
            found.append(
                f"{self.name}: gives shared memory back before {len(self.late_reads)} reads have arrived, {allowed} "
                f"are stated ({self.late_reads[0]}); let the barrier use what was read (named_sync_after, "
                "mbarrier_arrive_after), or state number and reason in LATE_READS of a module of its folder"
            )
        return found

    def _allowed(self, stated: Mapping[str, tuple[int, str]]) -> int:
        return max((n for part, (n, _) in stated.items() if part in self.kernel), default=0)


def inspect_triton(
    kernel: Any, *, operation: str, implementation: str, case: str, folder: Path
) -> Compiled:
    """Read the code of one Triton or Gluon kernel."""
    cubin = kernel.asm["cubin"]
    path = folder / f"{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cubin)
    try:
        code, (registers, stack) = disassemble(path), _resources(path)
    finally:
        path.unlink()
    source = kernel.asm.get("ttir", "") + kernel.asm.get("ttgir", "")
    return Compiled(
        operation=operation,
        implementation=implementation,
        case=case,
        kernel=kernel.metadata.name,
        registers=registers,
        spill_bytes=stack if _spills(code) else 0,
        shared_bytes=kernel.metadata.shared,
        has_product=_DOT.search(source) is not None,
        matrix_instructions=_matrix_instructions(code),
        late_reads=late_reads(code),
    )


def inspect_cuda(operation: str, library: CudaLibrary) -> list[Compiled]:
    """Compile a CUDA source and read the code of each of its kernels."""
    built = library.build()
    code = dict(
        (part.split("\n", 1)[0].strip(), part)
        for part in re.split(r"\n\s*Function : ", disassemble(built.path))[1:]
    )
    is_matrix_source = "wgmma" in library.source.read_text() or any(
        "wgmma" in path.read_text() for path in library.source.parent.glob("*.cuh")
    )
    found = []
    for name, report in re.findall(
        r"Compiling entry function '(\w+)'(.*?)(?=ptxas info\s+: Compiling|\Z)",
        built.log,
        re.DOTALL,
    ):
        instructions = _matrix_instructions(code[name])
        found.append(
            Compiled(
                operation=operation,
                implementation=library.source.name,
                case="",
                kernel=name,
                registers=_number(r"Used (\d+) registers", report),
                spill_bytes=_number(r"(\d+) bytes spill stores", report),
                shared_bytes=_number(r"(\d+) bytes smem", report),
                has_product=bool(instructions),
                matrix_instructions=instructions,
                late_reads=late_reads(code[name]),
            )
        )
    if not found:
        raise RoseError(
            f"{built.path} has no compiler's report beside it; remove it, so that it is built anew"
        )
    # Which of its kernels multiply cannot be told from outside; that some do, can.
    if is_matrix_source and not any(c.matrix_instructions for c in found):
        raise RoseError(
            f"{library.source} uses wgmma, and none of its kernels has such an instruction"
        )
    return found


def _resources(path: Path) -> tuple[int, int]:
    """Return registers and bytes of stack."""
    done = subprocess.run(
        [str(find_cuobjdump()), "--dump-resource-usage", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return _number(r"REG:(\d+)", done.stdout), _number(r"STACK:(\d+)", done.stdout)


def _spills(code: str) -> bool:
    return re.search(r"\b(?:STL|LDL)\b", code) is not None


def _matrix_instructions(code: str) -> list[str]:
    return [i for i in MATRIX_INSTRUCTIONS if re.search(rf"\b{i}\b", code)]


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0
