"""Recorded steps: all but the recording itself, which takes a GPU, with a graph that calls what it was given."""

from __future__ import annotations

import contextlib
import json

import batches
import graphs
import muon
import numpy as np
import packing
import pytest
import sizes
import torch
import train
import trainable
from export import end_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from rose.frontend.tokenizer import FolderTokenizer

TOKENIZER = packing.Path(packing.__file__).with_name("tokenizer.json")
SHAPE = (2, 384)


class CallingGraph:
    """Records nothing while it records, as a graph does, and writes to the same tensors on every replay."""

    def __init__(self):
        self.work, self.found, self.num_replays = None, None, 0

    def record(self, work):
        self.work = work

    def replay(self):
        found = self.work()
        if self.found is None:
            self.found = tuple(x.clone() for x in found)
        for room, x in zip(self.found, found, strict=True):
            room.copy_(x)
        self.num_replays += 1
        return self.found


class CallingRecorder:
    def __init__(self, make=CallingGraph):
        self.make, self.made = make, []

    def working(self):
        return contextlib.nullcontext()

    def refusing_to_wait(self):
        return contextlib.nullcontext()

    def graph(self):
        self.made.append(self.make())
        return self.made[-1]


@pytest.fixture(autouse=True)
def few_passages(monkeypatch):
    """The topics of Python's manual only: parsing the whole library takes seconds."""
    from pydoc_data import topics

    packing._text.cache_clear()
    monkeypatch.setattr(
        packing.english, "passages", lambda: [topics.topics[n] for n in sorted(topics.topics)]
    )


@pytest.fixture(scope="module")
def drawn():
    """Six batches of short rows."""
    plan = packing.Plan(TOKENIZER, 7, SHAPE, long_from=1000)
    return [plan.batch(step) for step in range(6)]


class Drawn:
    """A source of batches that are drawn."""

    def __init__(self, drawn):
        self.plan = packing.Plan(TOKENIZER, 7, SHAPE, long_from=1000)
        self._drawn = drawn

    def draw(self, step):
        return self._drawn[step % len(self._drawn)]

    def batches(self, first):
        while True:
            yield self.draw(first)
            first += 1


def _part(drawn, work, recorder=None, *, is_required=False, has_head=True):
    torch.manual_seed(7)
    settings = train.Settings(
        device="cpu", seed=7, work=work, source=Drawn(drawn), optimizer="muon",
        learning_rate=0.01, muon_rate=0.02, warmup=4, recorder=recorder,
        are_graphs_required=is_required,
    )  # fmt: skip
    eos = end_tokens(FolderTokenizer(TOKENIZER))
    config = sizes.model_config("trial", 3072, eos)
    model, mtp = trainable.TrainableGptOss(config), trainable.MtpHead(config)
    head = train.MtpPart(mtp, model, settings) if has_head else None
    return train.ModelPart("model", model, settings, head=head)


def _parameters(part):
    return [p.detach().clone() for m in part.members() for p in m.module.parameters()]


def _states(part):
    return [
        x.clone()
        for m in part.members()
        for o in m.optimizers
        for state in o.state.values()
        for x in state.values()
    ]


def test_room_that_is_not_used_changes_neither_loss_nor_gradients(drawn, tmp_path):
    """In float64 the same but for the order of the sums over places."""
    part = _part(drawn, tmp_path)
    for member in part.members():
        member.module.double()
    part.model.tools.rounding = torch.zeros_like  # float32 alone can be rounded
    fixed = batches.Fixed(SHAPE, "cpu", None)
    for batch in (drawn[0], drawn[1]):  # the second into what the first has left behind
        assert fixed.fill(batch)
        found = []
        for tensors in (batches.on_device(batch, "cpu"), fixed.tensors):
            losses = []
            for member in part.members():
                member.module.zero_grad()
                loss, beside = member.loss(tensors, is_rounded=False)
                (loss + beside).backward()
                losses.append(loss.detach())
            found.append((losses, [p.grad for m in part.members() for p in m.module.parameters()]))
        (losses, grads), (padded_losses, padded_grads) = found
        assert len(fixed.tensors.places) > int((fixed.tensors.weights > 0).sum()) > 0
        torch.testing.assert_close(losses, padded_losses, rtol=1e-6, atol=0)  # float32 logits
        for grad, padded in zip(grads, padded_grads, strict=True):
            torch.testing.assert_close(grad, padded, rtol=1e-5, atol=1e-8)  # float32 logits


def test_a_batch_with_more_places_than_room_is_told_and_leaves_all_as_it_was(drawn):
    fixed = batches.Fixed(SHAPE, "cpu", None)
    assert fixed.fill(drawn[0])
    before = fixed.tensors.all_tokens.clone()
    full = packing.Batch(
        drawn[1].tokens, drawn[1].positions, drawn[1].docs, np.ones_like(drawn[1].is_learnt)
    )
    assert not fixed.fill(full)
    assert torch.equal(fixed.tensors.all_tokens, before)


def test_room_is_for_places_of_the_batch_alone():
    fixed = batches.Fixed((12, 4096), "cpu", None)
    assert fixed.bound % 128 == 0
    assert 0.4 <= fixed.bound / fixed.num_places < 0.41
    assert batches.Fixed((1, 100), "cpu", None).bound == 100


@pytest.mark.parametrize("window", [128, 100, None])
def test_lists_of_blocks_are_those_that_flex_attention_makes_and_serve_the_next_batch(window):
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    place = torch.arange(512)
    first, second = (
        (place[:, None] >= torch.tensor(ends)).sum(1).int().expand(2, -1).contiguous()
        for ends in ([100, 128, 390], [40, 300, 301])
    )
    number, order, *transposed = trainable.block_lists(first, window)
    made = BlockMask.from_kv_blocks(number, order, BLOCK_SIZE=128)
    assert torch.equal(made.q_num_blocks, transposed[0])
    assert torch.equal(made.q_indices, transposed[1])
    lists = (number, order, *transposed)
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in lists)
    docs = first.clone()
    mask = trainable.block_mask_of(docs, window, lists)
    # Written anew it is the second batch's mask, which is how a recorded step meets it.
    docs.copy_(second)
    for room, x in zip(lists, trainable.block_lists(second, window), strict=True):
        room.copy_(x)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 1, 512, 64, generator=generator) for _ in range(3))
    sinks = torch.randn(1, generator=generator)
    found = trainable.attend_flex(flex_attention, q, k, v, sinks, mask)
    wanted = trainable.attend_plain(q, k, v, sinks, second, window)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)  # float32 sums in another order


def test_fixed_masks_are_those_of_the_batch(drawn):
    fixed = batches.Fixed(SHAPE, "cpu", (128, None))
    for batch in drawn[:2]:
        assert fixed.fill(batch)
        docs = torch.from_numpy(batch.docs[:, :-1].copy())
        for window, mask in fixed.tensors.block_masks.items():
            wanted = trainable.block_mask(docs, window)
            assert torch.equal(mask.to_dense(), wanted.to_dense())
            assert torch.equal(mask.q_indices, wanted.q_indices)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_rate_in_a_tensor_is_the_rate_as_a_number(is_fused):
    """AdamW as it is set up for a GPU (fused) and for a CPU, and Muon; float32, so equal to a few last bits."""
    moved = []
    for is_tensor in (False, True):
        generator = torch.Generator().manual_seed(3)
        vector = torch.nn.Parameter(torch.randn(33, generator=generator))
        matrix = torch.nn.Parameter(torch.randn(4, 48, 32, generator=generator))
        heads = torch.nn.Parameter(torch.randn(128, 96, generator=generator))
        optimizers = [
            torch.optim.AdamW([vector], lr=1.0, weight_decay=0.05, fused=is_fused),
            muon.Muon(
                [{"params": [matrix]}, {"params": [heads], "rows": 64}], lr=1.0, weight_decay=0.01
            ),
        ]
        for step in range(3):
            for parameter in (vector, matrix, heads):
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    rate = 0.01 * (step + 1)
                    if not is_tensor:
                        group["lr"] = rate
                    elif isinstance(group["lr"], float):
                        group["lr"] = torch.tensor(rate)
                    else:
                        group["lr"].fill_(rate)
                optimizer.step()
        moved.append([vector.detach(), matrix.detach(), heads.detach()])
    for number, tensor in zip(*moved, strict=True):
        torch.testing.assert_close(number, tensor, rtol=1e-6, atol=1e-7)


def test_the_forms_of_a_run_are_those_its_steps_have(drawn, tmp_path):
    part = _part(drawn, tmp_path)
    assert [f.name for f in part.forms(None)] == ["plain", "rounded", "rounded with head"]
    assert part.forms(20) == part.forms(None)
    part.head_steps = 18
    assert [f.name for f in part.forms(20)] == ["plain", "plain with head", "rounded with head"]
    assert [f.name for f in _part(drawn, tmp_path, has_head=False).forms(None)] == [
        "plain",
        "rounded",
    ]


def test_preparing_moves_nothing_and_replayed_steps_are_those_that_are_not_recorded(
    drawn, tmp_path
):
    plain, recorder = _part(drawn, tmp_path / "a"), CallingRecorder()
    part = _part(drawn, tmp_path / "b", recorder)
    before = _parameters(part)
    part.prepare(10)
    assert all(torch.equal(a, b) for a, b in zip(before, _parameters(part), strict=True))
    assert not any(x.any() for x in _states(part))
    reports = [line for line in part.settings.log if "graph" in line]
    assert [r["steps_are"] for r in reports] == ["replayed"] * 3
    assert all(r["difference"] == 0 and r["of_two_not_recorded"] == 0 for r in reports)
    for each in (plain, part):
        each.settings.work.mkdir()
    # The order of sums over places, in float32, carried on by ten steps.
    assert part.run(10, 1000) == pytest.approx(plain.run(10, 1000), rel=2e-3)
    of_heads = [[float(x) for x in p.head.losses] for p in (part, plain)]
    assert len(of_heads[0]) == 4
    assert of_heads[0] == pytest.approx(of_heads[1], rel=2e-3)
    assert dict(part.replays.counts) == {"replayed": 10}
    assert sum(g.num_replays for g in recorder.made) == 10 + 2 * 3
    assert {"part": "model", "steps_taken": {"replayed": 10}} in part.settings.log


def test_a_step_with_too_many_places_is_taken_without_a_record_and_counted(drawn, tmp_path):
    full = packing.Batch(
        drawn[1].tokens, drawn[1].positions, drawn[1].docs, np.ones_like(drawn[1].is_learnt)
    )
    mixed = [drawn[0], full, drawn[2], drawn[3]]
    plain = _part(mixed, tmp_path / "a")
    part = _part(mixed, tmp_path / "b", CallingRecorder())
    part.prepare(4)
    for each in (plain, part):
        each.settings.work.mkdir()
    assert part.run(4, 1000) == pytest.approx(plain.run(4, 1000), rel=1e-3)  # order of sums
    assert dict(part.replays.counts) == {"replayed": 3, "more_places_than_room": 1}


def test_a_run_that_was_stopped_goes_on_replaying(drawn, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    part = _part(drawn, tmp_path / "a", CallingRecorder())
    part.prepare(8)
    for step in range(6):
        part.losses.append(part._step(step, 8, drawn[step]))
    part._save(tmp_path / "a" / "model.pt", 8)
    again = _part(drawn, tmp_path / "a", CallingRecorder())
    again.prepare(None)
    assert len(again.losses) == 6
    states = [s for o in again.optimizers for s in o.state.values()]
    losses = again.run(None, 1000)
    assert dict(again.replays.counts) == {"replayed": 2}
    still = [s for o in again.optimizers for s in o.state.values()]
    assert all(a is b for a, b in zip(states, still, strict=True)), (
        "loaded a second time: recorded steps would move state that nobody reads"
    )
    straight = _part(drawn, tmp_path / "b")
    assert losses == pytest.approx(straight.run(8, 1000), rel=2e-3)  # order of sums
    # What was saved with rates in tensors is gone on with without, and the other way round.
    numbers = _part(drawn, tmp_path / "a")
    numbers.resume()
    assert all(isinstance(g["lr"], float) for o in numbers.optimizers for g in o.param_groups)
    tensors = _part(drawn, tmp_path / "b", CallingRecorder())
    kept = [g["lr"] for o in tensors.optimizers for g in o.param_groups]
    tensors.resume()
    assert all(
        a is b
        for a, b in zip(
            kept, (g["lr"] for o in tensors.optimizers for g in o.param_groups), strict=True
        )
    )


class RaisingGraph(CallingGraph):
    def record(self, work):
        work()  # half of it is done, and then
        raise RuntimeError("operation not permitted when stream is capturing")


class StaleGraph(CallingGraph):
    """Replays with the batch and the rates that it was recorded with, as numbers in a graph would be."""

    def __init__(self, stale):
        super().__init__()
        self.stale = stale

    def record(self, work):
        self.work = lambda: self.stale(work)


def _stale(kind, drawn, part):
    """Return a graph that does one thing wrong."""

    def rate(work):
        part().set_rates(graphs.RECORDED_FACTOR)
        return work()

    def batch(work):
        part().fixed_of_test.fill(drawn[0])
        return work()

    def twice(work):
        work()
        return work()

    def nothing(work):
        return tuple(torch.tensor(8.0) for _ in range(1))

    def one_parameter(work):
        sinks = part().model.layers[0].sinks
        before = sinks.detach().clone()
        found = work()
        with torch.no_grad():
            sinks.copy_(before)
        return found

    def not_a_number(work):
        found = work()
        with torch.no_grad():
            part().model.lm_head[0, 0] = float("nan")
        return found

    def loss(work):
        return tuple(x + 0.1 for x in work())

    return {
        f.__name__: f for f in (rate, batch, twice, nothing, one_parameter, not_a_number, loss)
    }[kind]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("rate", "all moves together"),
        ("batch", "all moves together"),
        ("twice", "all moves together"),
        ("nothing", "all moves together"),
        ("one_parameter", "layers.0.sinks"),
        ("not_a_number", "all moves together"),
        ("loss", "losses differ"),
    ],
)
def test_a_replay_that_does_something_else_is_found_and_not_used(drawn, tmp_path, kind, told):
    stale = _stale(kind, drawn, lambda: part)
    part = _part(drawn, tmp_path, CallingRecorder(lambda: StaleGraph(stale)), has_head=False)
    made = train.Fixed

    def noted(*arguments):
        part.fixed_of_test = made(*arguments)
        return part.fixed_of_test

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "Fixed", noted)
        before = _parameters(part)
        part.prepare(4)
    reports = [line for line in part.settings.log if "graph" in line]
    assert all(told in r["wrong"] for r in reports), reports
    assert {r["steps_are"] for r in reports} == {"launched one by one"}
    assert all(torch.equal(a, b) for a, b in zip(before, _parameters(part), strict=True))
    losses = part.run(4, 1000)
    assert len(losses) == 4
    assert dict(part.replays.counts) == {"form_not_recorded": 4}


def test_a_recording_that_fails_is_told_and_leaves_the_training_as_it_was(drawn, tmp_path):
    part = _part(drawn, tmp_path, CallingRecorder(RaisingGraph))
    before = _parameters(part)
    part.prepare(4)
    assert all(torch.equal(a, b) for a, b in zip(before, _parameters(part), strict=True))
    assert not any(x.any() for x in _states(part))
    failed = [line["failed"] for line in part.settings.log if "failed" in line]
    assert len(failed) == len(part.forms(4)) == 2
    assert all("not permitted when stream is capturing" in text for text in failed)
    (tmp_path / "straight").mkdir()
    straight = _part(drawn, tmp_path / "straight", CallingRecorder())  # rates in tensors, too
    assert part.run(4, 1000) == straight.run(4, 1000)


def test_where_the_host_would_wait_is_told(drawn, tmp_path):
    class Watching(CallingRecorder):
        @contextlib.contextmanager
        def refusing_to_wait(self):
            yield
            raise RuntimeError("called a synchronizing CUDA operation")

    part = _part(drawn, tmp_path, Watching(), has_head=False)
    part.prepare(2)
    reports = [line for line in part.settings.log if "graph" in line]
    assert all("synchronizing" in r["host_waits"] for r in reports)
    assert {r["steps_are"] for r in reports} == {"replayed"}, "recording and comparison decide"


@pytest.mark.parametrize(
    "make", [RaisingGraph, lambda: StaleGraph(lambda work: (work(), work())[1])]
)
def test_required_graphs_that_fail_end_the_run_before_it_writes_anything(
    drawn, tmp_path, monkeypatch, make
):
    monkeypatch.setattr(train, "recorder_of", lambda *_: CallingRecorder(make))
    words = (
        "--size trial --batch 2 384 --workers 0 --device cpu --steps 4 2 2 --graphs auto "
        f"--out {tmp_path / 'out'} --work {tmp_path / 'work'}"
    ).split()
    arguments = train.arguments_of(words)
    arguments.graphs = "required"  # which the command line does not take for a CPU
    monkeypatch.setattr(train, "arguments_of", lambda _: arguments)
    with pytest.raises(train.GraphsFailedError, match="part model, step plain"):
        train.main(words)
    assert not (tmp_path / "out").exists()


def test_the_whole_run_replays_all_parts(tmp_path, monkeypatch):
    recorder = CallingRecorder()
    monkeypatch.setattr(train, "recorder_of", lambda *_: recorder)
    monkeypatch.setattr(train, "ASKED", ("arithmetic",))
    words = (
        "--size trial --batch 2 384 --workers 0 --device cpu --steps 6 2 3 --scored 1 --long-from 99 "
        f"--lr 0.01 --warmup 2 --out {tmp_path} --work {tmp_path / 'work'}"
    )
    train.main(words.split())
    log = json.loads((tmp_path / "log.json").read_text())
    assert {name: len(x) for name, x in log["losses"].items()} == {"model": 6, "mtp": 2, "draft": 3}
    taken = {line["part"]: line["steps_taken"] for line in log["log"] if "steps_taken" in line}
    assert taken == {"model": {"replayed": 6}, "draft": {"replayed": 3}}
    prepared = [(x["part"], x["graph"]) for x in log["log"] if "graph" in x]
    assert prepared[-2:] == [("draft", "plain"), ("draft", "rounded")], "before any step is taken"
    assert len(prepared) == 5


def test_told_to_end_while_steps_are_recorded(tmp_path, monkeypatch):
    class Ending(CallingGraph):
        def record(self, work):
            work()
            train.end()

    monkeypatch.setattr(train, "recorder_of", lambda *_: CallingRecorder(Ending))
    words = (
        f"--size trial --batch 2 384 --workers 0 --device cpu --steps 4 2 2 --out {tmp_path} "
        f"--work {tmp_path / 'work'}"
    )
    train.main(words.split())
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["losses"] == {}
    assert (tmp_path / "tiny-gpt-oss" / "model.safetensors").exists()


def test_graphs_are_off_on_a_cpu_and_cannot_be_required_of_it(capsys):
    assert train.recorder_of("auto", "cpu") is None
    assert train.recorder_of("off", "cuda") is None
    with pytest.raises(SystemExit) as ended:
        train.arguments_of(["--out", "x", "--device", "cpu", "--graphs", "required"])
    assert ended.value.code != 0
    assert "take a GPU" in capsys.readouterr().err


def test_the_device_is_waited_for_when_the_clock_is_read():
    pace = train.Pace(1.0, is_fixed=False)
    timed = [n for n in range(400) if pace.is_timed(n)]
    assert timed == [30, 110, 210, 310]
    assert not any(train.Pace(1.0, is_fixed=True).is_timed(n) for n in range(400))


class Watch(TorchDispatchMode):
    """Notes what a recording does not allow: the host reads numbers, or a size depends on them, or hands some over."""

    FORBIDDEN = (
        "_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "lift_fresh", "equal",
        "bincount", "repeat_interleave.Tensor", "is_nonzero",
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.noted, self.num_calls = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += 1
        name = str(func).removeprefix("aten.")
        if name.startswith(self.FORBIDDEN):
            self.noted.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", [train.Form(False), train.Form(True), train.Form(True, True)])
def test_no_step_reads_a_number_on_the_host(drawn, tmp_path, form):
    part = _part(drawn, tmp_path, CallingRecorder())
    for member in part.members():  # AdamW as on a GPU
        for group in member.optimizers[0].param_groups:
            group["fused"] = True
    fixed = batches.Fixed(SHAPE, "cpu", None)
    fixed.fill(drawn[0])
    part.work(form, fixed.tensors)  # tables and the optimisers' state are made in the first step
    with Watch() as watch:
        part.work(form, fixed.tensors)
    assert watch.num_calls > 500
    assert not watch.noted
    with Watch() as watch:
        torch.ones(2).sum().item()
    assert watch.noted, "the watch sees what it is for"


def test_a_layer_compiled_for_masks_made_on_the_device_serves_fixed_ones(drawn):
    """Another stride or type would compile all layers again, for half a minute of a run."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(7)
    model = trainable.TrainableGptOss(sizes.model_config("trial", 97, (2,)))
    body = torch.compile(trainable.Block.body, backend="aot_eager", dynamic=False, fullgraph=True)
    model.tools = trainable.Tools(flex=flex_attention, body=body)
    fixed = batches.Fixed(SHAPE, "cpu", model.config.window_tokens)
    fixed.fill(drawn[0])
    x = torch.randn(*SHAPE, 64, generator=torch.Generator().manual_seed(5))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    with torch.no_grad():
        for batch in (batches.on_device(drawn[0], "cpu"), fixed.tensors):
            rows = model.rows(batch.positions, batch.docs, batch.block_masks)
            found.append([layer(x, rows, model.tools, False)[0] for layer in model.layers])
    for made, kept in zip(*found, strict=True):
        assert torch.equal(made, kept)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
