"""Train the embedded model, its MTP head and its draft, and write both checkpoints.

usage: PYTHONPATH=src python training/train.py --minutes 8 --out DIR [--work DIR] [--steps N M K]
The head learns beside the model, in the last steps of it. On a GPU everything takes --minutes: the first steps of each
part are timed, and as many follow as fit. --steps (model, MTP head, draft; printed at the end and in the card) repeats
a run. Killed? The same command goes on from there. Told to end (SIGTERM)? What is there is exported, and not scored.
On a GPU a step is recorded as a CUDA graph and replayed (--graphs), compared with one that is not before it is used.
"""

import argparse
import contextlib
import json
import math
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from batches import Fixed, Tensors, on_device
from card import plot, write_card
from export import SavedFileError, end_tokens, export, load_parent, load_saved, save_parent
from graphs import CudaRecorder, Form, Recorder, Replays, Steps
from muon import Muon
from packing import Batch, Plan, Source
from sizes import SIZES, active_parameters, model_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear
from trainable import MtpHead, Rows, Tools, TrainableGptOss, compiled

from rose.eval.rendering import Documents
from rose.eval.tasks import ASKED, held_out_set
from rose.frontend.tokenizer import FolderTokenizer

SHARES = {"model": 0.85, "mtp": 0.15, "draft": 0.15}
"""Of the minutes, among the parts trained. The MTP head learns beside the model and in its minutes, where both are."""
MTP_SHARE = 0.4
"""Of the model's steps, at their end, in which the MTP head learns too: one block more in each."""
LATER_STEPS = 1.15
"""Time of a step, rounding and in the end the MTP head counted in, over one of the first: a guess, corrected later."""
TIMED_STEPS, SKIPPED_STEPS = 80, 30
"""Steps that set the rate, after those in which kernels are compiled and first used."""
PLAN_STEPS = 100
"""Steps after which the number of steps is compared with the time that is left."""
PLAN_TOLERANCE = 0.02
"""Relative error of that number that is left alone: every correction bends the schedule of the rates."""
SAVE_SECONDS = 60
ROUNDED_FROM = 0.35
"""Share of the steps after which experts are trained through MXFP4 rounding; before, the plain ones settle."""
BALANCE = 0.01
MOST_DRAWN = 40
"""Batches among which two are sought that fit a recorded step."""


@dataclass
class Settings:
    """What all parts share."""

    device: str
    seed: int
    work: Path
    source: Source
    optimizer: str
    """muon (AdamW beside it) or adamw."""
    learning_rate: float
    """Of AdamW."""
    muon_rate: float
    warmup: int
    """Steps."""
    profile: Path | None = None
    """Where to write the times of one step's kernels."""
    recorder: Recorder | None = None
    """Records steps as graphs; None: every step is launched by the host, kernel by kernel."""
    are_graphs_required: bool = False
    log: list[dict] = field(default_factory=list)
    is_ended: bool = False
    """Told to end: what follows is skipped, but for the export."""

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Hold all work of the device between, as recording wants it."""
        return contextlib.nullcontext() if self.recorder is None else self.recorder.working()

    def say(self, **values) -> None:
        """Print and keep a line."""
        self.log.append(values)
        print(json.dumps(values), flush=True)


class Part:
    """One thing to train: parameters, and the loss of a batch."""

    model: TrainableGptOss
    """Which is trained, or under what is."""

    def __init__(
        self,
        name: str,
        module: TrainableGptOss | MtpHead,
        settings: Settings,
        rate: float = 1.0,
    ) -> None:
        self.name, self.module, self.settings = name, module.to(settings.device), settings
        self.losses: list[Tensor | float] = []
        by_kind: dict[str, list[nn.Parameter]] = {
            k: [] for k in ("heads", "inner", "table", "vector")
        }
        for key, parameter in module.named_parameters():
            by_kind[kind_of(key)].append(parameter)
        if settings.optimizer == "adamw":
            by_kind["table"] += by_kind.pop("heads") + by_kind.pop("inner")
        groups = [
            {"params": by_kind["table"], "weight_decay": 0.05},
            {"params": by_kind["vector"], "weight_decay": 0.0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [g for g in groups if g["params"]],
                lr=settings.learning_rate * rate,
                betas=(0.9, 0.95),
                fused=settings.device != "cpu",
            )
        ]
        if settings.optimizer == "muon":
            groups = [
                {"params": by_kind["heads"], "rows": module.config.head_dim},
                {"params": by_kind["inner"]},
            ]
            self.optimizers.append(Muon(groups, lr=settings.muon_rate, weight_decay=0.01))
        self.rates = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.replays: Replays | None = None
        self._resumed: int | None = None
        """Steps of the run that is gone on with."""
        self._has_resumed = False
        if settings.recorder is not None:
            # A recorded step reads its rates from the device: numbers would stay what they were.
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = torch.tensor(group["lr"], device=settings.device)
                    if "capturable" in group:
                        group["capturable"] = settings.device != "cpu"

    def loss(self, batch: Tensors, *, is_rounded: bool) -> tuple[Tensor, Tensor]:
        """Return the mean loss of learnt tokens, and what is to be minimised beside it."""
        raise NotImplementedError

    def form(self, step: int, steps: int | None) -> Form:
        """Return the form of a step; `steps` of None: not known yet."""
        raise NotImplementedError

    def forms(self, steps: int | None) -> list[Form]:
        """Return the forms that the steps will have."""
        raise NotImplementedError

    def members(self) -> "list[Part]":
        """Return the parts that a step trains: this one, and what learns beside it."""
        return [self]

    def work(self, form: Form, batch: Tensors) -> tuple[Tensor, ...]:
        """Take a step; return the losses of `members` that learn in it. Work of the device alone: it is recorded."""
        return (self.learn(batch, is_rounded=form.is_rounded),)

    def resume(self, steps: int | None = None) -> int | None:
        """Go on from the state that is saved, where one is; return its number of steps, or `steps`. Looks once.

        HAZARD: new state of the optimisers comes with it, which steps recorded before would not know.
        Raises   SavedFileError where it cannot be gone on from
        """
        state_path = self._state_path()
        is_due, self._has_resumed = not self._has_resumed, True
        if is_due and state_path.exists():
            try:
                load_saved(state_path, self._take_back, self.settings.device)
            except SavedFileError as error:
                raise SavedFileError(
                    f"{error}; a run of the same command and sizes leaves there what it goes on from; delete the file "
                    f"to train part {self.name} from its beginning, or give --work another folder"
                ) from error
            self.settings.say(part=self.name, resumed_at=len(self.losses), steps=self._resumed)
        return steps if self._resumed is None else self._resumed

    def _take_back(self, state: dict) -> None:
        self.restore(state)
        self._resumed = state["steps"]

    def _state_path(self) -> Path:
        return self.settings.work / f"{self.name}.pt"

    def prepare(self, steps: int | None) -> None:
        """Record the steps and compare, from the state that training begins with and leaves as it is.

        Raises   GraphsFailedError where a form cannot be recorded, or differs, and graphs are required
        """
        settings, recorder = self.settings, self.settings.recorder
        steps = self.resume(steps)
        if recorder is None or (steps is not None and len(self.losses) >= steps):
            return
        windows = None if self.model.tools.flex is None else self.model.config.window_tokens
        fixed = Fixed(settings.source.plan.shape, settings.device, windows)
        replays = Replays(recorder, fixed, self._steps())
        drawn = self._fitting(replays)
        if drawn is None:
            return
        for form in self.forms(steps):
            report = {"part": self.name, "graph": form.name, **replays.prepare(form, drawn)}
            why = report.get("failed") or report.get("wrong")
            settings.say(**report, steps_are="launched one by one" if why else "replayed")
            if why and settings.are_graphs_required:
                raise GraphsFailedError(f"part {self.name}, step {form.name}: {why}")
        self.replays = replays

    def _steps(self) -> Steps:
        members = self.members()

        def set_rates(factor: float) -> None:
            for member in members:
                member.set_rates(factor)

        return Steps(
            work=self.work,
            set_rates=set_rates,
            named_parameters=[
                (f"{m.name}.{n}", p) for m in members for n, p in m.module.named_parameters()
            ],
            optimizers=[o for m in members for o in m.optimizers],
        )

    def _fitting(self, replays: Replays) -> tuple[Batch, Batch] | None:
        """Return two batches that fit; None, and it is said, where there are none."""
        settings, found = self.settings, []
        for step in range(MOST_DRAWN):
            drawn = settings.source.draw(step)
            if replays.fits(drawn):
                found.append(drawn)
            if len(found) == 2:
                return found[0], found[1]
        why = (
            f"of {MOST_DRAWN} batches of {list(settings.source.plan.shape)} fewer than two learn anything and fit "
            "a recorded step"
        )
        if settings.are_graphs_required:
            raise GraphsFailedError(f"part {self.name}: {why}; take larger ones, or --graphs off")
        settings.say(part=self.name, failed=why, steps_are="launched one by one")
        return None

    def run(self, steps: int | None, seconds: float) -> list[float]:
        """Train `steps` steps, or as many as fit in `seconds`; return the losses."""
        state_path = self._state_path()
        steps = self.resume(steps)
        try:
            steps = self._run(steps, seconds, state_path)
        except Ended:
            self.settings.is_ended = True
            self.settings.say(part=self.name, ended_at=len(self.losses), planned=steps)
        done = [float(x) for x in self.losses]
        if self.replays is not None:
            self.settings.say(part=self.name, steps_taken=dict(self.replays.counts))
        if not self.settings.is_ended:
            self._save(state_path, len(done))
        return done

    def _run(self, steps: int | None, seconds: float, state_path: Path) -> int:
        """Return the number of steps."""
        begin = saved = time.perf_counter()
        pace = Pace(seconds, is_fixed=steps is not None)
        source, waited = self.settings.source.batches(len(self.losses)), 0.0
        while steps is None or len(self.losses) < steps:
            step = len(self.losses)
            asked = time.perf_counter()
            drawn = next(source)
            waited += time.perf_counter() - asked
            if step == SKIPPED_STEPS // 2 and self.settings.profile is not None:
                profile(
                    lambda n=step, b=drawn: self._step(n, None, b),
                    self.settings.profile.with_suffix(f".{self.name}.txt"),
                )
            self.losses.append(self._step(step, steps, drawn))
            if pace.is_timed(step + 1):
                self._wait()
            planned, steps = steps, pace.steps(step + 1, steps)
            now = time.perf_counter()
            if steps != planned:
                self.settings.say(part=self.name, step=step, s=round(now - begin, 1), steps=steps)
            if step % 100 == 0 or len(self.losses) == steps:
                self.settings.say(
                    part=self.name,
                    step=step,
                    loss=round(float(self.losses[-1]), 4),
                    **self.beside(),
                    s=round(now - begin, 1),
                    waited_for_data=round(waited, 1),
                )
            if now - saved > SAVE_SECONDS and steps is not None:
                saved = now
                self._save(state_path, steps)
            if now - begin > 1.15 * seconds and steps is not None:
                # The rate was misjudged: what is there is kept, and the log says so.
                self.settings.say(part=self.name, stopped_at=len(self.losses), planned=steps)
                break
        return len(self.losses)

    def beside(self) -> dict[str, float]:
        """Return what else is said of a step."""
        return {}

    def _step(self, step: int, steps: int | None, drawn: Batch) -> Tensor:
        """Take one step; the loss stays on the device, so that the host runs ahead."""
        # While the rate is being timed the number of steps is not known; the schedule is flat there anyway.
        self.set_rates(self.factor(step, step / steps if steps else 0.0))
        return self.take(self.form(step, steps), drawn)[0]

    def factor(self, step: int, done: float) -> float:
        """Return what the rates are multiplied by; done: share of the steps behind."""
        warm = min(1.0, (step + 1) / self.settings.warmup)
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))

    def set_rates(self, factor: float) -> None:
        """Multiply the rates that the optimisers were made with."""
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * factor)
                else:
                    group["lr"] = rate * factor

    def take(self, form: Form, drawn: Batch) -> tuple[Tensor, ...]:
        """Take a step, replayed where it is recorded; return what `work` returns."""
        losses = None if self.replays is None else self.replays.take(form, drawn)
        return losses or self.work(form, on_device(drawn, self.settings.device))

    def learn(self, batch: Tensors, *, is_rounded: bool) -> Tensor:
        """Move the parameters by the gradients of a batch, at the rates that are set; return its loss."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.settings.device != "cpu"):
            loss, beside = self.loss(batch, is_rounded=is_rounded)
        self.module.zero_grad(set_to_none=True)
        (loss + beside).backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def _wait(self) -> None:
        if self.settings.device != "cpu":
            torch.cuda.synchronize()

    def _save(self, path: Path, steps: int) -> None:
        torch.save(self.state() | {"steps": steps}, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def state(self) -> dict:
        """Return all that going on takes."""
        return {
            "module": self.module.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "losses": [float(x) for x in self.losses],
        }

    def restore(self, state: dict) -> None:
        """Take back what `state` returned."""
        self.module.load_state_dict(state["module"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            # Rates and flags are this run's: whether it records steps is not the saved run's business.
            own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            optimizer.load_state_dict(kept)
            for group, options in zip(optimizer.param_groups, own, strict=True):
                group.update(options)
        self.losses = state["losses"]


class GraphsFailedError(RuntimeError):
    """Steps could not be recorded, and were required to be."""


class Ended(BaseException):
    """The process was told to end; no error, and nothing that catches errors shall catch it."""


def end(*_: object) -> None:
    """Leave what is being done, as a handler of SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


class Pace:
    """Fits the number of steps into the time."""

    def __init__(self, seconds: float, *, is_fixed: bool) -> None:
        self.seconds, self.is_fixed = seconds, is_fixed
        self.begin = self.mark = time.perf_counter()
        self._each: list[float] = []
        """Seconds per step of the last stretches."""

    def is_timed(self, taken: int) -> bool:
        """Tell whether `steps` reads the clock when `taken` are; a device has to be waited for then."""
        later = taken - SKIPPED_STEPS - TIMED_STEPS
        is_later = later >= 0 and later % PLAN_STEPS == 0
        return not self.is_fixed and (taken == SKIPPED_STEPS or is_later)

    def steps(self, taken: int, steps: int | None) -> int | None:
        """Return how many steps there will be, when `taken` are; None: not known yet."""
        if self.is_fixed:
            return steps
        now = time.perf_counter()
        if taken == SKIPPED_STEPS:
            self.mark = now
        if taken == SKIPPED_STEPS + TIMED_STEPS:
            each, self.mark = (now - self.mark) / TIMED_STEPS, now
            return self._fitting(taken, LATER_STEPS * each, now)
        if steps is None or (taken - SKIPPED_STEPS - TIMED_STEPS) % PLAN_STEPS:
            return steps
        self._each = [*self._each[-2:], (now - self.mark) / PLAN_STEPS]
        self.mark = now
        # The fastest of three: compiling something in one of them says nothing of what is to come.
        fitting = self._fitting(taken, min(self._each), now)
        # Before the head learns, steps are faster than they will be; LATER_STEPS was counted in.
        is_late = now - self.begin > 0.65 * self.seconds
        is_off = abs(fitting - steps) > PLAN_TOLERANCE * steps
        return fitting if is_late and is_off and len(self._each) == 3 else steps

    def _fitting(self, taken: int, each: float, now: float) -> int:
        return max(taken + 1, taken + int(0.985 * (self.seconds - (now - self.begin)) / each))


def mean_loss(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy; 0 where nothing is learnt (a long document cut off by a short row)."""
    losses = cross_entropy(logits.float(), wanted, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


class ModelPart(Part):
    """A model that predicts the next token, and a head that learns beside it near the end."""

    def __init__(
        self,
        name: str,
        model: TrainableGptOss,
        settings: Settings,
        rate: float = 1.0,
        head: "MtpPart | None" = None,
        head_steps: int | None = None,
    ) -> None:
        super().__init__(name, model, settings, rate)
        self.model = model
        self.head, self.head_steps = head, head_steps

    def loss(self, batch: Tensors, *, is_rounded: bool) -> tuple[Tensor, Tensor]:
        """Cross-entropy of learnt tokens, and the penalty on uneven routing."""
        model = self.model
        model.is_rounded = is_rounded
        rows = model.rows(batch.positions, batch.docs, batch.block_masks)
        hidden, penalty = model(batch.tokens, rows)
        if self.head is not None:
            self.head.seen = rows, hidden.detach()
        logits = model.logits(hidden.flatten(0, 1).index_select(0, batch.places))
        return mean_loss(logits, batch.next_one, batch.weights), BALANCE * penalty

    def form(self, step: int, steps: int | None) -> Form:
        """Rounded from ROUNDED_FROM on; the head learns at the end."""
        if steps is None:
            return Form(is_rounded=False)
        is_rounded = step / steps >= ROUNDED_FROM
        # Once begun it goes on: a corrected number of steps may move where it would begin.
        has_head = self.head is not None and (
            step >= steps - self._head_steps(steps) or bool(self.head.losses)
        )
        return Form(is_rounded, has_head)

    def _head_steps(self, steps: int) -> int:
        return round(MTP_SHARE * steps) if self.head_steps is None else self.head_steps

    def forms(self, steps: int | None) -> list[Form]:
        """Plain, rounded, and what the head makes of them."""
        forms = [Form(is_rounded=False), Form(is_rounded=True)]
        if self.head is not None:
            forms.append(Form(is_rounded=True, has_head=True))
        if steps is not None:
            forms = sorted({self.form(step, steps) for step in range(len(self.losses), steps)})
        return forms

    def members(self) -> list[Part]:
        """Return the model and its head."""
        return [self] if self.head is None else [self, self.head]

    def work(self, form: Form, batch: Tensors) -> tuple[Tensor, ...]:
        """Take a step, the head's after the model's."""
        losses = super().work(form, batch)
        if not form.has_head:
            return losses
        assert self.head is not None, "forms with a head are of models that have one"
        return *losses, self.head.learn(batch, is_rounded=True)

    def _step(self, step: int, steps: int | None, drawn: Batch) -> Tensor:
        form, head = self.form(step, steps), self.head
        self.set_rates(self.factor(step, step / steps if steps else 0.0))
        if head is not None and form.has_head:
            assert steps is not None, "the head begins near the end"
            taken = len(head.losses)
            head.set_rates(head.factor(taken, taken / (taken + steps - step)))
        loss, *of_head = self.take(form, drawn)
        if head is not None:
            if step == 0 and not of_head and self.replays is None:
                head.rehearse(on_device(drawn, self.settings.device))
            head.losses += of_head
        return loss

    def beside(self) -> dict[str, float]:
        """Return the loss of the head."""
        if self.head is None or not self.head.losses:
            return {}
        return {"mtp_loss": round(float(self.head.losses[-1]), 4)}

    def state(self) -> dict:
        """Return all that going on takes, the head's state with it."""
        return super().state() | ({} if self.head is None else {"head": self.head.state()})

    def restore(self, state: dict) -> None:
        """Take back what `state` returned."""
        super().restore(state)
        if self.head is not None:
            self.head.restore(state["head"])


class MtpPart(Part):
    """A head that predicts the token after the next; what it learns does not move the model under it."""

    def __init__(self, head: MtpHead, model: TrainableGptOss, settings: Settings) -> None:
        super().__init__("mtp", head, settings)
        self.model = model
        self.seen: tuple[Rows, Tensor] | None = None
        """Rows and hidden states of the batch, where the model has just been trained on it."""

    def form(self, step: int, steps: int | None) -> Form:
        """Rounded, as the model under it is."""
        return Form(is_rounded=True)

    def forms(self, steps: int | None) -> list[Form]:
        """Return the only one."""
        return [Form(is_rounded=True)]

    def loss(self, batch: Tensors, *, is_rounded: bool) -> tuple[Tensor, Tensor]:
        """Cross-entropy of learnt tokens two places on."""
        model = self.model
        rows, hidden = self.seen or self._look(batch)
        self.seen = None
        with torch.no_grad():
            embedded = embedding(batch.all_tokens[:, 1:], model.embed_tokens)
        x = self.module(hidden, embedded, rows, model.tools)
        places = x.flatten(0, 1).index_select(0, batch.places_of_two)
        logits = linear(places, model.lm_head.detach())
        return mean_loss(logits, batch.next_two, batch.weights_of_two), logits.new_zeros(())

    def rehearse(self, batch: Tensors) -> None:
        """Compute gradients and forget them: what cannot be compiled shows now and not after some minutes."""
        seen = self.seen
        with torch.autocast("cuda", torch.bfloat16, enabled=self.settings.device != "cpu"):
            loss, _ = self.loss(batch, is_rounded=True)
        loss.backward()
        self.module.zero_grad(set_to_none=True)
        self.seen = seen

    @torch.no_grad()
    def _look(self, batch: Tensors) -> tuple[Rows, Tensor]:
        self.model.is_rounded = True
        rows = self.model.rows(batch.positions, batch.docs, batch.block_masks)
        return rows, self.model(batch.tokens, rows)[0]


def profile(step: Callable[[], object], path: Path) -> None:
    """Write the times of the kernels of a step, which is taken more than once (the run differs from one without)."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    begin = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        both = time.perf_counter() - begin
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"3 steps: host {host:.4f} s, with device {both:.4f} s\n{table}\n")


def kind_of(name: str) -> str:
    """Return who trains a parameter: Muon by heads or as it is, or AdamW with weight decay (table) or without."""
    name = name.rsplit(".", 1)[-1]
    if name == "qkv_proj":
        return "heads"
    if name in ("o_proj", "gate_up_proj", "down_proj", "proj"):
        return "inner"
    return "table" if name in ("embed_tokens", "lm_head", "router") else "vector"


def gradient(x: Tensor) -> Tensor:
    """Return what the last backward pass left at a tensor that took part in it."""
    assert x.grad is not None, "no part in the loss"
    return x.grad


def choose_tools(model: TrainableGptOss, wanted: str, device: str, shape: tuple[int, int]) -> Tools:
    """Return the fastest tools that work on this device; says what was found. `auto` tries one after the other."""
    for kind in ("block", "parts") if wanted == "auto" else (wanted,):
        begin = time.perf_counter()
        tools = compiled(kind)
        try:
            error = layers_difference(model, tools, device, shape)
        except Exception as problem:  # noqa: BLE001 - whatever the compiler raises, the next kind may work
            print(json.dumps({"tools": kind, "failed": str(problem)[:2000]}), flush=True)
            continue
        seconds = round(time.perf_counter() - begin, 1)
        print(json.dumps({"tools": kind, "error": error, "s": seconds}), flush=True)
        # bf16 leaves about 1 % in gradients that are sums of many terms; a wrong mask or sink leaves half of all.
        if error < 0.15:
            return tools
    return compiled("plain")


def layers_difference(
    model: TrainableGptOss, tools: Tools, device: str, shape: tuple[int, int]
) -> float:
    """Return the largest relative difference of a window and a full layer to plain attention as written.

    Outputs and gradients. `shape`: rows and tokens as in training, so that what is compiled here serves there.
    """
    rows, tokens = shape
    generator = torch.Generator(device).manual_seed(1)
    place = torch.arange(tokens, device=device)
    docs = (place // 300).int().expand(rows, -1).contiguous()
    positions = (place % 300).expand(rows, -1)
    x = torch.randn(rows, tokens, model.config.hidden_size, generator=generator, device=device)
    probe = torch.randn(x.shape, generator=generator, device=device)
    kept, worst = model.tools, 0.0
    for layer in model.layers[:2]:
        found: list[list[Tensor]] = []
        for tried in (Tools(), tools):
            model.tools = tried
            model.zero_grad(set_to_none=True)
            entering = x.clone().requires_grad_()
            with torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu"):
                out, _ = layer(entering, model.rows(positions, docs), tried, True)
            (out * probe).sum().backward()
            grads = [gradient(p).clone() for p in layer.parameters()]
            # Without the stream that passes by, which would hide the rest.
            found.append([out.detach() - x, gradient(entering) - probe, *grads])
        pairs = zip(*found, strict=True)
        worst = max(worst, *(float((a - b).norm() / (a.norm() + 1e-9)) for a, b in pairs))
    model.tools = kept
    model.zero_grad(set_to_none=True)
    return worst


Asked = dict[str, list[tuple[list[int], int]]]
"""By task: tokens of question and answer, and how many of them are the question's."""


@torch.no_grad()
def choices(
    model: TrainableGptOss,
    token_ids: list[int],
    first: int,
    device: str,
    mtp: MtpHead | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the most likely tokens of an answer given those before each, and what the head takes for them.

    The head's are those from the second token on: it sees the last token of the question at the earliest.
    """
    tokens = torch.tensor([token_ids], device=device)
    place = torch.arange(len(token_ids) - 1, device=device)[None]
    rows = model.rows(place, torch.zeros_like(place))
    with torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu"):
        hidden, _ = model(tokens[:, :-1], rows)
        best = model.logits(hidden[0, first - 1 :]).argmax(-1)
        if mtp is None:
            return best, None
        x = mtp(hidden, embedding(tokens[:, 1:], model.embed_tokens), rows, model.tools)
        return best, model.logits(x[0, first - 1 : -1]).argmax(-1)


def teacher_forced(
    model: TrainableGptOss, asked: Asked, *, is_rounded: bool, device: str
) -> dict[str, float]:
    """Return per task the share of answers whose every token is the most likely one, given those before."""
    # Every length is a shape: nothing is compiled here.
    model.is_rounded, model.tools = is_rounded, Tools()
    shares = {}
    for task, wholes in asked.items():
        right = 0
        for token_ids, first in wholes:
            best, _ = choices(model, token_ids, first, device)
            right += best.tolist() == token_ids[first:]
        shares[task] = right / len(wholes)
    return shares


def agreement(
    model: TrainableGptOss, draft: TrainableGptOss, mtp: MtpHead, asked: Asked, device: str
) -> dict[str, float]:
    """Return the shares of the answers' tokens for which the draft and the head choose what the model chooses."""
    found = {"draft": [0, 0], "mtp": [0, 0]}
    for each in (model, draft):
        each.is_rounded, each.tools = True, Tools()
    for token_ids, first in (whole for wholes in asked.values() for whole in wholes[:5]):
        best, guessed = choices(model, token_ids, first, device, mtp)
        drafted, _ = choices(draft, token_ids, first, device)
        assert guessed is not None, "a head was given"
        for name, mine, wanted in (("draft", drafted, best), ("mtp", guessed, best[1:])):
            found[name][0] += int((mine == wanted).sum())
            found[name][1] += len(wanted)
    return {name: right / max(1, tokens) for name, (right, tokens) in found.items()}


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number}; allowed: 0 or more")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; allowed: 1 or more")
    return number


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; allowed: more than 0")
    return minutes


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=_minutes, default=8.0, help="for the three parts together"
    )
    parser.add_argument(
        "--steps", type=_count, nargs=3, default=None, metavar=("MODEL", "MTP", "DRAFT")
    )
    parser.add_argument("--size", default="large", choices=("large", *SIZES))
    parser.add_argument(
        "--batch", type=_positive, nargs=2, default=(12, 4096), metavar=("ROWS", "TOKENS")
    )
    parser.add_argument("--long-every", type=_positive, default=8, help="rows of which one is long")
    parser.add_argument("--long-from", type=int, default=300, help="step from which rows are long")
    parser.add_argument("--optimizer", default="muon", choices=("muon", "adamw"))
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW")
    parser.add_argument("--warmup", type=_positive, default=150, help="steps")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", default="auto", choices=("auto", "block", "parts", "plain", "none")
    )
    parser.add_argument(
        "--graphs",
        default="auto",
        choices=("auto", "required", "off"),
        help="steps as CUDA graphs: where they work, or end if they do not, or never",
    )
    parser.add_argument(
        "--workers", type=_count, default=12, help="processes that draw data; 0: none"
    )
    parser.add_argument("--parts", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--start", type=Path, help="parent.pt of an earlier run, to go on from")
    parser.add_argument("--profile", type=Path, help="write the times of one step's kernels")
    parser.add_argument("--scored", type=_count, default=40, help="held-out questions per task")
    root = Path(__file__).resolve().parent
    parser.add_argument("--tokenizer", type=Path, default=root / "tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=root.parent / ".cache/training")
    arguments = parser.parse_args(words)
    is_there = arguments.device == "cpu" or (
        arguments.device.split(":")[0] == "cuda" and torch.cuda.is_available()
    )
    if not is_there:
        found = "a GPU" if torch.cuda.is_available() else "no GPU"
        parser.error(
            f"--device {arguments.device}: found {found}; allowed: cpu, or cuda with a GPU"
        )
    if arguments.graphs == "required" and arguments.device == "cpu":
        parser.error(
            "--graphs required: the device is cpu and graphs take a GPU; allowed: auto, off"
        )
    return arguments


def command_of(arguments: argparse.Namespace) -> str:
    """Return the command in short: options that differ from their defaults, files by name, the output as DIR."""
    usual, words = vars(arguments_of(["--out", "DIR"])), []
    for name, value in vars(arguments).items():
        if value != usual[name] and name not in ("out", "work", "profile"):
            values = value if isinstance(value, list) else [value]
            words.append(f"--{name.replace('_', '-')}")
            words += [v.name if isinstance(v, Path) else str(v) for v in values]
    return " ".join(["python training/train.py", *words, "--out DIR"])


def main(words: list[str] | None = None) -> None:
    """Train the three parts, export, score, write the card."""
    arguments = arguments_of(words)
    arguments.work.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    device = arguments.device
    torch.set_float32_matmul_precision("high")
    path = arguments.tokenizer.resolve()
    plan = Plan(
        path, arguments.seed, tuple(arguments.batch), arguments.long_every, arguments.long_from
    )
    # Before the device is touched and before SIGTERM means something else: it forks.
    source = Source(plan, arguments.workers)
    signal.signal(signal.SIGTERM, end)
    settings = settings_of(arguments, source)
    if settings.recorder is None:
        settings.say(graphs="off", why="the device is a CPU" if device == "cpu" else "--graphs off")
    tokenizer = FolderTokenizer(path)
    eos = end_tokens(tokenizer)
    config = model_config(arguments.size, tokenizer.vocab_size, eos)
    draft_size = "draft" if arguments.size == "large" else "trial"
    draft_config = model_config(draft_size, tokenizer.vocab_size, eos)
    torch.manual_seed(arguments.seed)
    model, mtp, draft = TrainableGptOss(config), MtpHead(config), TrainableGptOss(draft_config)
    if arguments.start is not None:
        try:
            load_parent(model, mtp, arguments.start)
        except SavedFileError as error:
            source.close()
            raise SavedFileError(
                f"--start: {error}; give the parent.pt of a run with --size {arguments.size}"
            ) from error
    if arguments.compile != "none" and device != "cpu":
        with settings.working():
            tools = choose_tools(
                model.to(device), arguments.compile, device, tuple(arguments.batch)
            )
        model.tools = draft.tools = tools
    settings.say(
        device=torch.cuda.get_device_name() if device != "cpu" else "cpu",
        torch=torch.__version__,
        python=platform.python_version(),
        active=active_parameters(config),
        active_draft=active_parameters(draft_config),
    )
    steps: dict[str, int | None] = dict(zip(SHARES, arguments.steps or (None,) * 3, strict=True))
    head = MtpPart(mtp, model, settings)
    is_beside = {"model", "mtp"} <= set(arguments.parts)
    parts = {
        "model": ModelPart(
            "model",
            model,
            settings,
            head=head if is_beside else None,
            head_steps=steps["mtp"],
        ),
        "mtp": head,
        "draft": ModelPart("draft", draft, settings, rate=1.5),
    }
    out, losses, command = arguments.out, {}, command_of(arguments)

    def written(scores: dict[str, dict[str, float]]) -> None:
        write_card(out, config, draft_config, settings.log, losses, scores, arguments, command)

    with settings.working():
        try:
            # Before anything is written: where graphs are required and fail, nothing has been learnt.
            prepare_parts(parts, steps, arguments)
        except BaseException:
            source.close()
            raise
        try:
            train_parts(parts, steps, arguments, begin)
        finally:  # a part that fails does not take with it what others have learnt
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a matter of seconds
            losses |= {name: [float(x) for x in p.losses] for name, p in parts.items() if p.losses}
            export(model, tokenizer, out / "tiny-gpt-oss", mtp)
            save_parent(model, mtp, out / "parent.pt")
            if "draft" in losses:
                export(draft, tokenizer, out / "tiny-gpt-oss-draft")
            written({})
            plot(losses, out / "loss.png")
            source.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if settings.is_ended:
        return
    scores = score(model, draft, mtp, tokenizer, arguments)
    settings.say(
        scores=scores,
        steps={n: len(x) for n, x in losses.items()},
        minutes=(time.perf_counter() - begin) / 60,
    )
    written(scores)


def settings_of(arguments: argparse.Namespace, source: Source) -> Settings:
    """Return what all parts share."""
    return Settings(
        device=arguments.device,
        seed=arguments.seed,
        work=arguments.work,
        source=source,
        optimizer=arguments.optimizer,
        learning_rate=arguments.lr,
        muon_rate=arguments.muon_lr,
        warmup=arguments.warmup,
        profile=arguments.profile,
        recorder=recorder_of(arguments.graphs, arguments.device),
        are_graphs_required=arguments.graphs == "required",
    )


def recorder_of(wanted: str, device: str) -> Recorder | None:
    """Return what records steps, or None: on a CPU, and where it is not wanted."""
    return None if wanted == "off" or device == "cpu" else CudaRecorder()


def score(
    model: TrainableGptOss,
    draft: TrainableGptOss,
    mtp: MtpHead,
    tokenizer: FolderTokenizer,
    arguments: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Return shares of held-out answers: of the rounded model, of its parent, and what draft and head guess of them."""
    documents, device = Documents(tokenizer), arguments.device
    asked = {
        task: [documents.whole(e) for e in held_out_set(task, arguments.scored, seed=0)]
        for task in ASKED
    }
    return {
        "agreement": agreement(model, draft, mtp, asked, device),
        "mxfp4": teacher_forced(model, asked, is_rounded=True, device=device),
        "parent": teacher_forced(model, asked, is_rounded=False, device=device),
    }


def _in_order(arguments: argparse.Namespace) -> list[str]:
    """Return the parts that are trained one after the other."""
    names = [name for name in SHARES if name in arguments.parts]
    if "model" in names and "mtp" in names:
        names.remove("mtp")  # learns beside the model
    return names


def prepare_parts(
    parts: dict[str, Part], steps: dict[str, int | None], arguments: argparse.Namespace
) -> None:
    """Load what was saved and record all steps that will be replayed, before one is taken or timed."""
    settings = parts["model"].settings
    try:
        for name in _in_order(arguments):
            parts[name].prepare(steps[name])
    except Ended:
        settings.is_ended = True
        settings.say(ended_at=0, why="told to end before the first step")


def train_parts(
    parts: dict[str, Part],
    steps: dict[str, int | None],
    arguments: argparse.Namespace,
    begin: float,
) -> None:
    """Train one part after the other, each in its share of the minutes that are left."""
    names = _in_order(arguments)
    for i, name in enumerate(names):
        if parts[name].settings.is_ended:
            return
        left = 60 * arguments.minutes - (time.perf_counter() - begin)
        share = SHARES[name] / sum(SHARES[n] for n in names[i:])
        parts[name].run(steps[name], max(left, 1.0) * share)


if __name__ == "__main__":
    try:
        main()
    except SavedFileError as found:
        sys.exit(f"error: {found}")
