"""Reads of shared memory that a kernel does not wait for before it gives the memory back are found in machine code."""

from __future__ import annotations

import re

import pytest

from rose.kernels.aot_reads import late_reads, parse
from rose.utils.errors import RoseError

FROM_CUOBJDUMP = """\
        /*a6a0*/                   LDSM.16.M88.4 R84, [R84] ;                    /* 0x000000005454783b */
                    /* 0x000e220000000200 */
        /*a6b0*/                   LOP3.LUT R101, R101, R48, RZ, 0x3c, !PT ;        /* 0x0000003065657212 */
                    /* 0x000fe200078e3cff */
        /*a6c0*/                   BAR.SYNC.DEFER_BLOCKING R49, 0x80 ;                    /* 0x000200310000751d */
                    /* 0x0001ec0000010000 */
        /*a6d0*/               @P2 BRA 0xac90 ;                    /* 0x00000004006c2947 */
                    /* 0x000fea0003800000 */
"""
"""Of the E4M3 experts as they once gave wrong numbers."""


def _code(*lines: str) -> str:
    """Return "TEXT", "TEXT sets N", "TEXT waits N" as cuobjdump prints them, from 0x10000 on; a copy and EXIT last."""
    printed = []
    for number, line in enumerate([*lines, "UTMALDG.2D [UR20], [UR18]", "EXIT"]):
        sets = re.search(r" sets (\d)", line)
        waits = re.findall(r" waits (\d)", line)
        control = (
            (int(sets[1]) if sets else 7) << 5 | 7 << 8 | sum(1 << int(w) for w in waits) << 11
        )
        text = re.sub(r" (sets|waits) \d", "", line)
        printed.append(f"        /*{0x10000 + 16 * number:x}*/  {text} ;  /* 0x0000000000000000 */")
        printed.append(f"        /* 0x{control << 41:016x} */")
    return "\n".join(printed)


def test_control_bits_are_read_from_what_cuobjdump_prints():
    read, _, barrier, jump = parse(FROM_CUOBJDUMP)
    assert (read.address, read.opcode, read.sets, read.waits) == (0xA6A0, "LDSM.16.M88.4", 0, 0)
    assert read.is_read
    assert barrier.gives_back
    assert (barrier.operands, barrier.sets, barrier.waits) == ("R49, 0x80", 7, 0)
    assert (jump.guard, jump.name) == ("@P2", "BRA")


@pytest.mark.parametrize(
    "barrier",
    [
        "BAR.SYNC.DEFER_BLOCKING R49, 0x80",
        "BAR.SYNC.DEFER_BLOCKING 0x0",
        "BAR.ARV R4, 0x100",
        "@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR15+0x10], RZ",
    ],
)
def test_a_read_on_its_way_at_a_barrier_is_late(barrier):
    code = _code("LDSM.16.M88.4 R84, [R84] sets 0", barrier, "IADD3 R1, R84, R2, RZ waits 0")
    (late,) = late_reads(code)
    assert "at 0x10010 does not wait for LDSM.16.M88.4 at 0x10000" in late


@pytest.mark.parametrize(
    "lines",
    [
        ("LDS R4, [R4] sets 3", "BAR.SYNC 0x1, 0x80 waits 3"),
        ("LDS R4, [R4] sets 3", "ISETP.NE.U32.AND P0, PT, R4, 0x1, PT waits 3", "BAR.RED.OR 0x1, 0x80, !P0"),
        ("LDS R4, [R4] sets 3", "DEPBAR.LE SB3, 0x0", "BAR.SYNC 0x1, 0x80"),
        ("LDS R4, [R4] sets 3", "DEPBAR.LE SB0, 0x1, {4,3}", "BAR.SYNC 0x1, 0x80"),
        ("LDS R4, [R4]", "LDS R5, [R5] sets 2", "BAR.SYNC 0x1, 0x80 waits 2"),
        ("LDG.E R4, desc[UR4][R4.64] sets 3", "BAR.SYNC 0x1, 0x80"),
        ("LDS R4, [R4] sets 3", "SYNCS.ARRIVE.TRANS64 RZ, [UR17], R4"),
    ],
    ids=["waits", "used", "all_of_it", "in_braces", "in_order", "global", "announces_bytes"],
)  # fmt: skip
def test_a_read_that_has_arrived_or_is_not_given_back_is_not(lines):
    assert late_reads(_code(*lines)) == []


@pytest.mark.parametrize(
    "lines",
    [
        ("LDS R4, [R4] sets 3", "BAR.SYNC 0x1, 0x80 waits 2"),
        ("LDS R4, [R4] sets 3", "DEPBAR.LE SB3, 0x1", "BAR.SYNC 0x1, 0x80"),
        ("LDS R4, [R4] sets 3", "@P0 DEPBAR.LE SB3, 0x0", "BAR.SYNC 0x1, 0x80"),
        ("LDS R4, [R4]", "LDC R5, c[0x0][0x210] sets 2", "BAR.SYNC 0x1, 0x80 waits 2"),
    ],
    ids=["waits_for_another", "all_but_one", "perhaps", "out_of_order"],
)
def test_what_may_not_have_arrived_is_late(lines):
    assert len(late_reads(_code(*lines))) == 1


def test_every_path_is_followed():
    around = ("@P0 BRA 0x10020", "IADD3 R1, R4, R2, RZ waits 3", "BAR.SYNC 0x1, 0x80")
    jumped_over = ("LDS R4, [R4] sets 3", "BRA 0x10030", "BAR.SYNC 0x1, 0x80", "EXIT")
    assert late_reads(_code(*jumped_over)) == []
    (late,) = late_reads(_code("LDS R4, [R4] sets 3", "@P0 BRA 0x10030", *around[1:]))
    assert "at 0x10030 does not wait for LDS at 0x10000" in late
    loop = ("BAR.SYNC 0x1, 0x80", "LDS R4, [R4] sets 3", "@P0 BRA 0x10000")
    (late,) = late_reads(_code(*loop))
    assert "at 0x10000 does not wait for LDS at 0x10010" in late
    in_call = ("LDS R4, [R4] sets 3", "CALL.REL.NOINC 0x10030", "EXIT", "BAR.SYNC 0x1, 0x80")
    assert len(late_reads(_code(*in_call))) == 1


def test_without_copies_ordinary_stores_keep_their_order():
    code = _code("LDS R4, [R4] sets 3", "BAR.SYNC 0x1, 0x80")
    assert len(late_reads(code)) == 1
    assert late_reads(code.replace("UTMALDG.2D", "STS.128")) == []


def test_a_jump_to_nowhere_named_is_refused():
    with pytest.raises(RoseError, match="BRX at 0x10000"):
        late_reads(_code("BRX R4 -0x10"))
