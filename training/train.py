"""Train the embedded model, its MTP head and its draft, and write both checkpoints.

usage: PYTHONPATH=src python training/train.py --minutes 8 --out DIR [--work DIR] [--steps N M K]
On a GPU everything takes --minutes: the first steps of each part are timed, and as many follow as fit. --steps (model,
MTP head, draft; printed at the end and in the card) repeats a run exactly. Killed? The same command goes on from there.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from card import plot, write_card
from export import export
from muon import Muon
from packing import ENGLISH, Batch, Plan, Source
from sizes import SIZES, active_parameters, model_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding
from trainable import MtpHead, Tools, TrainableGptOss, compiled

from rose.eval.rendering import Documents
from rose.eval.tasks import ASKED, held_out_set
from rose.frontend.tokenizer import FolderTokenizer

SHARES = {"model": 0.72, "mtp": 0.11, "draft": 0.17}
"""Of the minutes; the small parts compile kernels of their own too."""
TIMED_STEPS, SKIPPED_STEPS = 80, 30
"""Steps that set the rate, after those in which kernels are compiled and first used."""
SAVE_SECONDS = 60
ROUNDED_FROM = 0.35
"""Share of the steps after which experts are trained through MXFP4 rounding; before, the plain ones settle."""
BALANCE = 0.01
ENGLISH_WEIGHT = 0.25
"""Of a token of English: its loss is twenty times that of a question's, and hardly falls any more."""


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
    log: list[dict] = field(default_factory=list)

    def say(self, **values) -> None:
        """Print and keep a line."""
        self.log.append(values)
        print(json.dumps(values), flush=True)


class Part:
    """One thing to train: parameters, and the loss of a batch."""

    def __init__(self, name: str, module: nn.Module, settings: Settings, rate: float = 1.0) -> None:
        self.name, self.module, self.settings = name, module.to(settings.device), settings
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

    def loss(self, batch: "Tensors", done: float) -> tuple[Tensor, Tensor]:
        """Return the mean loss of learnt tokens, and what is to be minimised beside it."""
        raise NotImplementedError

    def run(self, steps: int | None, seconds: float) -> list[float]:
        """Train `steps` steps, or as many as fit in `seconds`; return the losses."""
        state_path = self.settings.work / f"{self.name}.pt"
        losses: list[Tensor | float] = []
        if state_path.exists():
            state = torch.load(state_path, weights_only=True, map_location=self.settings.device)
            self.module.load_state_dict(state["module"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            losses, steps = state["losses"], state["steps"]
            self.settings.say(part=self.name, resumed_at=len(losses), steps=steps)
        begin = saved = timed = time.perf_counter()
        source, waited = self.settings.source.batches(len(losses)), 0.0
        while steps is None or len(losses) < steps:
            step = len(losses)
            asked = time.perf_counter()
            drawn = next(source)
            waited += time.perf_counter() - asked
            if step == SKIPPED_STEPS // 2 and self.settings.profile is not None:
                profile(
                    lambda n=step, b=drawn: self._step(n, None, b),
                    self.settings.profile.with_suffix(f".{self.name}.txt"),
                )
            losses.append(self._step(step, steps, drawn))
            now = time.perf_counter()
            if step + 1 == SKIPPED_STEPS:
                self._wait()
                timed = time.perf_counter()
            if steps is None and step + 1 == SKIPPED_STEPS + TIMED_STEPS:
                self._wait()
                each = (time.perf_counter() - timed) / TIMED_STEPS
                left = seconds - (time.perf_counter() - begin)
                steps = max(step + 2, step + 1 + int(0.97 * left / each))
                self.settings.say(part=self.name, seconds_per_step=round(each, 4), steps=steps)
            if step % 100 == 0 or len(losses) == steps:
                self.settings.say(
                    part=self.name,
                    step=step,
                    loss=round(float(losses[-1]), 4),
                    s=round(now - begin, 1),
                    waited_for_data=round(waited, 1),
                )
            if now - saved > SAVE_SECONDS and steps is not None:
                saved = now
                self._save(state_path, losses, steps)
            if now - begin > 1.15 * seconds and steps is not None:
                # The rate was misjudged: what is there is kept, and the log says so.
                self.settings.say(part=self.name, stopped_at=len(losses), planned=steps)
                break
        done = [float(x) for x in losses]
        self._save(state_path, done, len(done))
        return done

    def _step(self, step: int, steps: int | None, drawn: Batch) -> Tensor:
        """Take one step; the loss stays on the device, so that the host runs ahead."""
        # While the rate is being timed the number of steps is not known; the schedule is flat there anyway.
        done = step / steps if steps else 0.0
        factor = min(1.0, (step + 1) / self.settings.warmup) * (
            0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
        )
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        batch = Tensors(drawn, self.settings.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.settings.device != "cpu"):
            loss, beside = self.loss(batch, done)
        self.module.zero_grad(set_to_none=True)
        (loss + beside).backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def _wait(self) -> None:
        if self.settings.device != "cpu":
            torch.cuda.synchronize()

    def _save(self, path: Path, losses: list, steps: int) -> None:
        state = {
            "module": self.module.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "losses": [float(x) for x in losses],
            "steps": steps,
        }
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)


class Tensors:
    """A batch on the device; inputs [B, T] and the flat places whose next token is learnt."""

    def __init__(self, drawn: Batch, device: str) -> None:
        def there(array) -> Tensor:
            tensor = torch.from_numpy(array)
            tensor = tensor.pin_memory() if device != "cpu" else tensor
            return tensor.to(device, non_blocking=True)

        tokens, docs, learnt = drawn.tokens, drawn.docs, drawn.is_learnt
        self.all_tokens = there(tokens.astype("int64"))
        self.tokens = self.all_tokens[:, :-1]
        self.positions = there(drawn.positions[:, :-1].astype("int64"))
        self.docs = there(docs[:, :-1].copy())
        # Chosen on the host: a device that had to count them would make the host wait.
        next_one = (learnt[:, 1:] > 0) & (docs[:, 1:] == docs[:, :-1])
        next_two = next_one.copy()
        next_two[:, :-1] = (learnt[:, 2:] > 0) & (docs[:, 2:] == docs[:, :-2])
        next_two[:, -1] = False
        self.places, self.places_of_two = (
            there(x.reshape(-1).nonzero()[0]) for x in (next_one, next_two)
        )
        self.next_one = there(tokens[:, 1:][next_one].astype("int64"))
        self.next_two = there(tokens[:, 2:][next_two[:, :-1]].astype("int64"))
        weight = np.where(learnt == ENGLISH, ENGLISH_WEIGHT, 1.0).astype("float32")
        self.weights = there(weight[:, 1:][next_one])
        self.weights_of_two = there(weight[:, 2:][next_two[:, :-1]])


def mean_loss(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy; 0 where nothing is learnt (a long document cut off by a short row)."""
    losses = cross_entropy(logits.float(), wanted, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


class ModelPart(Part):
    """A model that predicts the next token."""

    def loss(self, batch: Tensors, done: float) -> tuple[Tensor, Tensor]:
        """Cross-entropy of learnt tokens, and the penalty on uneven routing."""
        model = self.module
        model.is_rounded = done >= ROUNDED_FROM
        rows = model.rows(batch.positions, batch.docs)
        hidden, penalty = model(batch.tokens, rows)
        logits = model.logits(hidden.flatten(0, 1).index_select(0, batch.places))
        return mean_loss(logits, batch.next_one, batch.weights), BALANCE * penalty


class MtpPart(Part):
    """A head that predicts the token after the next; the model under it stands still."""

    def __init__(self, head: MtpHead, model: TrainableGptOss, settings: Settings) -> None:
        super().__init__("mtp", head, settings)
        self.model = model

    def loss(self, batch: Tensors, done: float) -> tuple[Tensor, Tensor]:
        """Cross-entropy of learnt tokens two places on."""
        model = self.model
        model.is_rounded = True
        rows = model.rows(batch.positions, batch.docs)
        with torch.no_grad():
            hidden, _ = model(batch.tokens, rows)
            embedded = embedding(batch.all_tokens[:, 1:], model.embed_tokens)
        x = self.module(hidden, embedded, rows, model.tools)
        logits = model.logits(x.flatten(0, 1).index_select(0, batch.places_of_two))
        return mean_loss(logits, batch.next_two, batch.weights_of_two), logits.new_zeros(())


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
            grads = [p.grad.clone() for p in layer.parameters()]
            # Without the stream that passes by, which would hide the rest.
            found.append([out.detach() - x, entering.grad - probe, *grads])
        pairs = zip(*found, strict=True)
        worst = max(worst, *(float((a - b).norm() / (a.norm() + 1e-9)) for a, b in pairs))
    model.tools = kept
    model.zero_grad(set_to_none=True)
    return worst


@torch.no_grad()
def teacher_forced(
    model: TrainableGptOss,
    asked: dict[str, list[tuple[list[int], int]]],
    *,
    is_rounded: bool,
    device: str,
) -> dict[str, float]:
    """Return per task the share of answers whose every token is the most likely one, given those before."""
    # Every length is a shape: nothing is compiled here.
    model.is_rounded, model.tools = is_rounded, Tools()
    shares = {}
    for task, wholes in asked.items():
        right = 0
        for token_ids, first in wholes:
            tokens = torch.tensor([token_ids], device=device)
            place = torch.arange(len(token_ids) - 1, device=device)[None]
            with torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu"):
                hidden, _ = model(tokens[:, :-1], model.rows(place, torch.zeros_like(place)))
                best = model.logits(hidden[0, first - 1 :]).argmax(-1)
            right += bool((best == tokens[0, first:]).all())
        shares[task] = right / len(wholes)
    return shares


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="for the three parts together")
    parser.add_argument(
        "--steps", type=int, nargs=3, default=None, metavar=("MODEL", "MTP", "DRAFT")
    )
    parser.add_argument("--size", default="large", choices=("large", *SIZES))
    parser.add_argument(
        "--batch", type=int, nargs=2, default=(12, 4096), metavar=("ROWS", "TOKENS")
    )
    parser.add_argument("--long-every", type=int, default=5, help="rows of which one is long")
    parser.add_argument("--long-from", type=int, default=300, help="step from which rows are long")
    parser.add_argument("--optimizer", default="muon", choices=("muon", "adamw"))
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW")
    parser.add_argument("--warmup", type=int, default=150, help="steps")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", default="auto", choices=("auto", "block", "parts", "plain", "none")
    )
    parser.add_argument("--workers", type=int, default=14, help="processes that draw data; 0: none")
    parser.add_argument("--parts", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--start", type=Path, help="parent.pt of an earlier run, to go on from")
    parser.add_argument("--profile", type=Path, help="write the times of one step's kernels")
    parser.add_argument("--scored", type=int, default=40, help="held-out questions per task")
    root = Path(__file__).resolve().parent
    parser.add_argument("--tokenizer", type=Path, default=root / "tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=root.parent / ".cache/training")
    return parser.parse_args(words)


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
    source = Source(plan, arguments.workers)  # before the device is touched: it forks
    settings = Settings(
        device=device,
        seed=arguments.seed,
        work=arguments.work,
        source=source,
        optimizer=arguments.optimizer,
        learning_rate=arguments.lr,
        muon_rate=arguments.muon_lr,
        warmup=arguments.warmup,
        profile=arguments.profile,
    )
    tokenizer = FolderTokenizer(path)
    eos = tuple(tokenizer.control_id(f"<|{n}|>") for n in ("return", "endoftext", "call"))
    config = model_config(arguments.size, tokenizer.vocab_size, eos)
    draft_size = "draft" if arguments.size == "large" else "trial"
    draft_config = model_config(draft_size, tokenizer.vocab_size, eos)
    torch.manual_seed(arguments.seed)
    model, mtp, draft = TrainableGptOss(config), MtpHead(config), TrainableGptOss(draft_config)
    if arguments.start is not None:
        weights = torch.load(arguments.start, weights_only=True)
        model.load_state_dict({name: w.float() for name, w in weights.items()})
    if arguments.compile != "none" and device != "cpu":
        tools = choose_tools(model.to(device), arguments.compile, device, tuple(arguments.batch))
        model.tools = draft.tools = tools
    settings.say(
        device=torch.cuda.get_device_name() if device != "cpu" else "cpu",
        torch=torch.__version__,
        python=platform.python_version(),
        active=active_parameters(config),
        active_draft=active_parameters(draft_config),
    )
    steps = dict(zip(SHARES, arguments.steps or (None,) * 3, strict=True))
    shares = {name: share for name, share in SHARES.items() if name in arguments.parts}
    parts = {
        "model": ModelPart("model", model, settings),
        "mtp": MtpPart(mtp, model, settings),
        "draft": ModelPart("draft", draft, settings, rate=1.5),
    }
    losses = {}
    for name in shares:
        left = 60 * arguments.minutes - (time.perf_counter() - begin)
        share = shares[name] / sum(shares[n] for n in shares if n not in losses)
        losses[name] = parts[name].run(steps[name], max(left, 1.0) * share)
        if name == "model":
            export(model, tokenizer, arguments.out / "tiny-gpt-oss")  # a run cut short leaves this
    export(model, tokenizer, arguments.out / "tiny-gpt-oss", mtp)
    weights = {name: p.detach().bfloat16().cpu() for name, p in model.named_parameters()}
    torch.save(weights, arguments.out / "parent.pt")
    if "draft" in losses:
        export(draft, tokenizer, arguments.out / "tiny-gpt-oss-draft")
    settings.source.close()
    documents = Documents(tokenizer)
    asked = {
        task: [documents.whole(e) for e in held_out_set(task, arguments.scored, seed=0)]
        for task in ASKED
    }
    scores = {
        name: teacher_forced(m, asked, is_rounded=rounded, device=device)
        for name, m, rounded in (
            ("mxfp4", model, True),
            ("parent", model, False),
            ("draft", draft, True),
        )
    }
    settings.say(
        scores=scores,
        steps={n: len(x) for n, x in losses.items()},
        minutes=(time.perf_counter() - begin) / 60,
    )
    write_card(arguments.out, config, draft_config, settings.log, losses, scores, arguments)
    plot(losses, arguments.out / "loss.png")


if __name__ == "__main__":
    main()
