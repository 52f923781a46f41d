"""Find, in machine code, reads of shared memory that are still on their way where a kernel gives the memory back.

A load from shared memory (LDS, LDSM) is issued, and its registers are filled later. An instruction waits for that
by a scoreboard: both name it in their control bits. The compiler puts the wait before the first use of the registers,
which may lie behind the barrier that tells another warp that the memory may be filled anew. Ordinary stores queue up
behind the loads; a copy by the bulk copy engine does not (cuda_common/mbarrier.cuh). So, in a kernel with such copies,
no load may be pending at a barrier of threads (BAR) or at an arrival on an mbarrier that announces no bytes.

Not known here: which memory a load reads. What ordinary stores wrote, and never a copy, is safe, and stated in
`LATE_READS` of a module of the kernel's folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rose.utils.errors import RoseError

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_SECOND_HALF = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_PARTS = re.compile(r"(@!?U?PT?\d* )?([A-Z0-9_.]+)(.*)", re.DOTALL)
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_NO_SCOREBOARD = 7
_COPIES = ("UBLKCP", "UTMALDG")
_IN_ORDER = ("LDS", "LDSM", "SHFL")
"""Answers of these come in the order of the questions, which the compiler builds on: one without a scoreboard has
arrived when the next of them that has one has."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction and what its control bits say of scoreboards."""

    address: int
    guard: str
    opcode: str
    operands: str
    sets: int
    """Scoreboard that is busy until the results have arrived, or 7."""
    waits: int
    """Mask of the scoreboards that have to be free before it is issued."""

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def is_read(self) -> bool:
        """Whether it reads shared memory into registers."""
        return self.name in ("LDS", "LDSM")

    @property
    def gives_back(self) -> bool:
        """Whether it tells other warps, or may tell them, that memory is free: T0 says that no bytes are announced."""
        is_arrival = self.opcode.startswith("SYNCS.ARRIVE") and re.search(r"T0\b", self.opcode)
        return bool(is_arrival) or self.name == "BAR"


def late_reads(code: str) -> list[str]:
    """Return each (barrier, pending load) of one function's SASS in words; none where nothing is copied in bulk.

    Raises  RoseError where a jump goes to a place that the code does not name
    """
    instructions = list(parse(code))
    if not any(i.name in _COPIES for i in instructions):
        return []
    return [
        f"{back.opcode} at {back.address:#x} does not wait for {read.opcode} at {read.address:#x}"
        for back, reads in _follow(instructions)
        for read in reads
    ]


def parse(code: str) -> Iterator[Instruction]:
    """Yield the instructions of one function as cuobjdump prints them: a line with the words, a line with the rest."""
    first: re.Match[str] | None = None
    for line in code.splitlines():
        if found := _LINE.match(line):
            first = found
        elif first is not None and (half := _SECOND_HALF.match(line)):
            parts = _PARTS.match(first[2])
            assert parts is not None, f"no opcode in {first[2]!r}"
            # Source: bits 105 to 125 of an instruction, as published for Volta and unchanged since: stall 4, yield 1,
            # scoreboard of results 3, of operands read 3, mask of those waited for 6, reuse 4.
            control = int(half[1], 16) >> 41
            yield Instruction(
                address=int(first[1], 16),
                guard=(parts[1] or "").strip(),
                opcode=parts[2],
                operands=parts[3].strip(),
                sets=control >> 5 & 7,
                waits=control >> 11 & 63,
            )
            first = None


Pending = frozenset[tuple[int, int]]
"""(index of a load, its scoreboard) of what may be on its way."""


def _follow(code: list[Instruction]) -> list[tuple[Instruction, list[Instruction]]]:
    """Carry what may be pending along every path; return it where memory is given back."""
    after = _successors(code)
    before: list[Pending | None] = [None] * len(code)
    before[0] = frozenset()
    late: dict[int, set[int]] = {}
    todo = [0]
    while todo:
        index = todo.pop()
        pending = _without_arrived(code[index], before[index] or frozenset())
        if code[index].gives_back and pending:
            late.setdefault(index, set()).update(load for load, _ in pending)
        pending = _with_issued(index, code[index], pending)
        for follower in after[index]:
            known = before[follower]
            if known is None or not pending <= known:
                before[follower] = pending | (known or frozenset())
                todo.append(follower)
    return [(code[i], [code[load] for load in sorted(loads)]) for i, loads in sorted(late.items())]


def _without_arrived(instruction: Instruction, pending: Pending) -> Pending:
    mask = instruction.waits
    if instruction.name == "DEPBAR" and not instruction.guard:
        # All but some of a scoreboard's have arrived, and all of those in braces.
        if found := re.search(r"SB(\d), 0x0\b", instruction.operands):
            mask |= 1 << int(found[1])
        if found := re.search(r"\{([\d,]+)\}", instruction.operands):
            mask |= sum(1 << int(n) for n in found[1].split(","))
    return frozenset((load, board) for load, board in pending if not mask >> board & 1)


def _with_issued(index: int, instruction: Instruction, pending: Pending) -> Pending:
    if instruction.name in _IN_ORDER and instruction.sets != _NO_SCOREBOARD:
        pending = frozenset(
            (load, instruction.sets if board == _NO_SCOREBOARD else board)
            for load, board in pending
        )
    if instruction.is_read:
        pending |= {(index, instruction.sets)}
    return pending


def _successors(code: list[Instruction]) -> list[list[int]]:
    """Return the indices of what may follow each instruction; a call also goes on behind itself."""
    at = {instruction.address: index for index, instruction in enumerate(code)}
    found: list[list[int]] = []
    for index, i in enumerate(code):
        follows = [index + 1] if index + 1 < len(code) else []
        if i.name in ("BRX", "JMX", "JMP"):
            raise RoseError(f"{i.opcode} at {i.address:#x}: where it goes is not in the code")
        if i.name in ("EXIT", "RET"):
            found.append(follows if i.guard else [])
        elif i.name in ("BRA", "CALL") or i.opcode == "WARPSYNC.COLLECTIVE":
            target = _TARGET.search(i.operands)
            jumps = [at[int(target[1], 16)]] if target else []
            # A predicate may also stand among the operands (BRA.DIV, BRA P0).
            goes_on = i.guard or i.opcode != "BRA" or re.search(r"\bU?P\d", i.operands)
            found.append(jumps + (follows if goes_on else []))
        else:
            found.append(follows)
    return found
