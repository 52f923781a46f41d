"""Kernels compiled ahead are those that launches then ask for; what goes wrong meanwhile is said and stops nothing.

What needs Triton's compiler runs in processes of its own: triton.jit decides at import whether it interprets.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rose.kernels import ahead
from rose.kernels.ahead import AheadKernels, Listed, ListError, find_list, write_lists

ROOT = Path(__file__).parents[2]


@dataclass(eq=False)
class Fake:
    """A listed kernel that takes a moment."""

    kernel: str
    seconds: float = 0.0
    error: Exception | None = None
    missing: bool = False
    made: list[str] = field(default_factory=list)

    def find(self):
        if self.missing:
            raise ListError(f"{self.kernel}: gone")
        return self.kernel

    def make(self, function):
        time.sleep(self.seconds)
        if self.error:
            raise self.error
        self.made.append(threading.current_thread().name)
        return function


def _ahead(kernels, **choices):
    opened, loaded = [], []
    made = AheadKernels(kernels, open_driver=opened.append, load=loaded.append, **choices)
    return made, opened, loaded


def _nothing():
    pass


def test_all_are_compiled_by_several_threads_and_waited_for():
    kernels = [Fake(f"k{i}", seconds=0.01) for i in range(20)]
    made, opened, loaded = _ahead(kernels, num_threads=4)
    made.begin(_nothing)
    told = []
    made.wait(told.append)
    assert sorted(loaded) == sorted(k.kernel for k in kernels)
    assert all(len(k.made) == 1 for k in kernels), "one was compiled twice"
    assert opened == [[k.kernel for k in kernels]], "the driver is opened once, for all"
    assert told[0].endswith(" of 20")
    assert "20 ready ahead" in made.outcome()
    assert "4 threads" in made.outcome()
    assert not [t for t in threading.enumerate() if t.name == "ahead"]


def test_what_fails_is_logged_and_counted_and_the_rest_is_compiled(caplog):
    kernels = [
        Fake("good"),
        Fake("bad", error=RuntimeError("no room\nat all")),
        Fake("old", missing=True),
    ]
    made, _, loaded = _ahead(kernels, num_threads=2)
    with caplog.at_level(logging.WARNING, logger="rose"):
        made.begin(_nothing)
        made.wait(_nothing_of)
    assert loaded == ["good"]
    assert (made.num_ready, made.num_failed) == (1, 2)
    assert "1 ready ahead of their first launch, 2 failed" in made.outcome()
    words = [record.getMessage() for record in caplog.records]
    assert "bad could not be compiled ahead: RuntimeError: no room" in words
    assert "old: gone" in words


def _nothing_of(_words):
    pass


def test_without_a_driver_nothing_is_compiled_ahead_and_the_start_goes_on(caplog):
    def broken(_functions):
        raise RuntimeError("no C compiler")

    loaded = []
    made = AheadKernels([Fake("a"), Fake("b")], open_driver=broken, load=loaded.append)
    with caplog.at_level(logging.WARNING, logger="rose"):
        made.begin(_nothing)
        made.wait(_nothing_of)
    assert not loaded
    assert "not compiled ahead: RuntimeError: no C compiler" in caplog.text


def test_where_no_thread_can_be_started_the_start_goes_on(caplog, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    made, _, loaded = _ahead([Fake("a")])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with caplog.at_level(logging.WARNING, logger="rose"):
        made.begin(_nothing)
    made.wait(_nothing_of)
    assert not loaded
    assert "can't start new thread" in caplog.text


def test_a_configuration_without_a_list_says_so():
    made = AheadKernels(())
    made.begin()
    made.wait(_nothing_of)
    made.num_unlisted = 3
    assert made.outcome().startswith("no list of Triton kernels is for this configuration: 3 were")
    assert find_list({"hidden_size": 7}) == ()


def test_lists_are_read_as_they_were_written(tmp_path, monkeypatch):
    one = Listed(
        kernel="a.b._k",
        arguments=("*bf16:16", 3, 0.5, None, True, "evict"),
        options=(("num_warps", 4),),
    )
    other = Listed(kernel="a.b._k", arguments=("*bf16:8",))
    lists = [({"x": 1}, [one, other]), ({"x": 2}, [other])]
    write_lists(tmp_path / "ahead.json", lists)
    monkeypatch.setattr(ahead, "FILE", tmp_path / "ahead.json")
    ahead._lists.cache_clear()
    try:
        assert find_list({"x": 1}) == (one, other)
        assert find_list({"x": 2}) == (other,)
    finally:
        ahead._lists.cache_clear()


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (Listed(kernel="no_such.triton_impl._kernel", arguments=()), "no_such"),
        (Listed(kernel="rms_norm.triton_impl._gone", arguments=()), "_gone"),
        (Listed(kernel="rms_norm.triton_impl._kernel", arguments=(1,)), "1 arguments are listed"),
    ],
)
def test_what_is_not_there_as_listed_is_refused(listed, words):
    pytest.importorskip("triton")
    with pytest.raises(ListError, match=words):
        listed.find()


CHILD = """
import sys
from fakes.launches import _NoDriver
from triton import knobs
from triton.runtime import driver
from rose.kernels import ahead
from rose.kernels.ahead import AheadKernels
from rose.utils.log import configure_logging

configure_logging()
driver.set_active(_NoDriver())
knobs.cache.dir = sys.argv[1]
{body}
"""


def _child(body, folder, *, code=0):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD.replace("{body}", body), str(folder)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


COMPILE = """
kernels = [k for k in ahead._lists()[0][1] if k.kernel.startswith("rms_norm")][:4]
made = AheadKernels(kernels, num_threads=3, load=lambda kernel: None)
made.begin(lambda: None)
made.wait(lambda words: None)
launched = [k.make(k.find()) for k in kernels]
print(made.num_ready, made.num_unlisted, len({k.hash for k in launched}))
"""


def test_what_was_compiled_ahead_is_what_a_launch_finds(tmp_path):
    pytest.importorskip("triton")
    done = _child(COMPILE, tmp_path)
    assert done.stdout == "4 0 4\n", done.stderr
    assert len(list(tmp_path.glob("*/*.cubin"))) == 4


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "file").write_text("no folder can be made below this")
    body = COMPILE.replace("launched = [k.make(k.find()) for k in kernels]", "launched = []")
    done = _child(body, tmp_path / "file" / "cache")
    assert done.stdout == "0 0 0\n"
    assert done.stderr.count("could not be compiled ahead: NotADirectoryError") == 4


SLOW = """
import sys, time
from rose.kernels.ahead import AheadKernels

class Slow:
    kernel = "slow"
    def find(self): return self
    def make(self, function): time.sleep(0.2)

made = AheadKernels([Slow()] * 1000, num_threads=3, open_driver=lambda _: None, load=lambda _: None)
made.begin(lambda: None)
print("begun", flush=True)
if sys.argv[1] == "end":
    raise SystemExit(3)
made.wait(lambda words: None)
"""


@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("end", None, 3),
        ("wait", signal.SIGINT, -signal.SIGINT),
        ("wait", signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_threads_end_with_the_main_thread(how, number, code):
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        begin = time.monotonic()
        if number is not None:
            time.sleep(0.1)
            child.send_signal(number)
        assert child.wait(30) == code
    # 1000 of them take more than a minute; what each thread is at takes 0.2 s.
    assert time.monotonic() - begin < 20
