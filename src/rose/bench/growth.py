"""Whether memory grows while an engine serves: what is held before and after many steps, nothing running at either end.

Requests end and begin all the time, as in a server. Before the first look a tenth of the steps, and at least one whole
request of every sequence, have been done: caches of the allocator, lazily loaded kernels and the pools of Python are
there. What still grows by design is the prefix cache's list of pages, until all pages are in it.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from rose.bench.load import Clients
from rose.bench.sweep import PromptSource, drain
from rose.engine.engine import LLMEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes held at one moment, or the difference of two moments."""

    allocated: int
    """By tensors on the device."""
    reserved: int
    """By torch's allocator there."""
    taken: int
    """Of the device's memory by everybody, libraries and graphs included."""
    resident: int
    """By this process in host memory."""

    @classmethod
    def now(cls, device: torch.device) -> Held:
        """Look; a CPU holds its tensors in what is resident."""
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if device.type != "cuda":
            return cls(allocated=0, reserved=0, taken=0, resident=resident)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return cls(
            allocated=torch.cuda.memory_allocated(device),
            reserved=torch.cuda.memory_reserved(device),
            taken=total - free,
            resident=resident,
        )

    def less(self, other: Held) -> Held:
        """Return the difference."""
        names = (field.name for field in fields(self))
        return Held(**{name: getattr(self, name) - getattr(other, name) for name in names})

    def words(self) -> dict[str, int]:
        """Return the numbers by name, for a result line."""
        return {f"{name}_bytes": number for name, number in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What was held before and after."""

    before: Held
    after: Held
    step_ms: list[float]
    """Of every step between them."""
    num_requests: int
    """That ended between them."""


def growth(
    engine: LLMEngine,
    prompts: PromptSource,
    *,
    steps: int,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
) -> Growth:
    """Keep `batch` requests running for `steps` steps; look at memory before and after."""
    device = engine.model.device
    run_steps(
        engine,
        prompts,
        max(steps // 10, output_tokens + batch),
        batch,
        prompt_tokens,
        output_tokens,
    )
    before = Held.now(device)
    step_ms, num_ended = run_steps(engine, prompts, steps, batch, prompt_tokens, output_tokens)
    return Growth(before=before, after=Held.now(device), step_ms=step_ms, num_requests=num_ended)


def run_steps(
    engine: LLMEngine,
    prompts: PromptSource,
    steps: int,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
) -> tuple[list[float], int]:
    """Return the time of each step and how many requests ended; nothing runs any more."""
    clients, step_ms, num_ended = Clients(engine, prompts), [], 0
    for i in range(batch):
        # Of unequal lengths, so that they do not end together.
        clients.add(prompt_tokens, 1 + output_tokens * (i + 1) // (batch + 1))
    for _ in range(steps):
        begin = time.perf_counter()
        ended = clients.step()
        step_ms.append((time.perf_counter() - begin) * 1e3)
        num_ended += len(ended)
        for _ in ended:
            clients.add(prompt_tokens, output_tokens)
    for request_id in engine.running_ids():
        engine.abort(request_id)
    drain(engine)
    return step_ms, num_ended
