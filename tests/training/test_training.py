"""The trainable model is the reference and the served one; a few steps learn, resume and export."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import english
import muon
import numpy as np
import packing
import pytest
import safetensors.torch
import sizes
import torch
import train
import trainable
from export import SavedFileError, end_tokens, export, export_parent, stored, tensors

from rose.config.engine import EngineConfig
from rose.config.quant import QuantConfig
from rose.engine.engine import LLMEngine
from rose.eval.rendering import Documents
from rose.eval.tasks import draw_long_for_training
from rose.frontend.tokenizer import FolderTokenizer
from rose.kernels.formats import decode
from rose.layers.own_pages import OwnPages
from rose.models.gpt_oss import reference
from rose.quant.mxfp4 import encode

TOKENIZER = Path(packing.__file__).with_name("tokenizer.json")


@pytest.fixture(autouse=True)
def few_passages(monkeypatch):
    """The topics of Python's manual only: parsing the whole library takes seconds."""
    from pydoc_data import topics

    packing._text.cache_clear()
    monkeypatch.setattr(
        english, "passages", lambda: [topics.topics[n] for n in sorted(topics.topics)]
    )


def _model(size="trial", vocab_size=97, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = trainable.TrainableGptOss(sizes.model_config(size, vocab_size, (2,))).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # zeros at first, which would hide them
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    return model


def _in_reference_names(model):
    named = tensors(model)
    weights = {
        "embedding.weight": named["model.embed_tokens.weight"],
        "norm.scale": named["model.norm.weight"],
        "unembedding.weight": named["lm_head.weight"],
    }
    for n in range(model.config.num_layers):
        at, to = f"model.layers.{n}.", f"block.{n}."
        weights |= {
            to + "attn.norm.scale": named[at + "input_layernorm.weight"],
            to + "attn.sinks": named[at + "self_attn.sinks"],
            to + "attn.out.weight": named[at + "self_attn.o_proj.weight"],
            to + "attn.out.bias": named[at + "self_attn.o_proj.bias"],
            to + "mlp.norm.scale": named[at + "post_attention_layernorm.weight"],
            to + "mlp.gate.weight": named[at + "mlp.router.weight"],
            to + "mlp.gate.bias": named[at + "mlp.router.bias"],
            to + "mlp.mlp1_weight": named[at + "mlp.experts.gate_up_proj"],
            to + "mlp.mlp1_bias": named[at + "mlp.experts.gate_up_proj_bias"],
            to + "mlp.mlp2_weight": named[at + "mlp.experts.down_proj"],
            to + "mlp.mlp2_bias": named[at + "mlp.experts.down_proj_bias"],
        }
        for kind in ("weight", "bias"):
            parts = [named[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            weights[f"{to}attn.qkv.{kind}"] = torch.cat(parts)
    return weights


def _reference_logits(model, token_ids):
    c = model.config
    config = reference.ReferenceConfig(
        num_layers=c.num_layers,
        num_q_heads=c.num_q_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        experts_per_token=c.experts_per_token,
    )
    return reference.forward(config, _in_reference_names(model), token_ids)


@pytest.mark.parametrize("cut", [256, 300], ids=["pieces", "whole"])
def test_the_trainable_model_is_the_reference_in_every_document_of_a_row(cut):
    model = _model()
    tokens = torch.randint(97, (2, cut), generator=torch.Generator().manual_seed(1))
    first = cut - 60  # the first document is longer than the window
    place = torch.arange(cut)
    docs = (place >= first).int().expand(2, -1)
    positions = torch.where(place < first, place, place - first).expand(2, -1)
    with torch.no_grad():
        logits = model.logits(model(tokens, model.rows(positions, docs))[0])
    for row in range(2):
        for part in (slice(0, first), slice(first, cut)):
            wanted = _reference_logits(model, tokens[row, part])
            # float64, but for the angles: float32 in both, in one the last bit of some differs
            torch.testing.assert_close(logits[row, part], wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("window", [128, None])
def test_flex_attention_gives_what_plain_attention_gives(window):
    """Forward only, which is all that flex attention can on a CPU; the trainer compares gradients on the GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    generator = torch.Generator().manual_seed(2)
    shapes = [(1, 2, 256, 64), (1, 1, 256, 64), (1, 1, 256, 64), (2,)]
    inputs = [torch.randn(s, generator=generator) for s in shapes]
    docs = (torch.arange(256) >= 170).int()[None]
    plain = trainable.attend_plain(*inputs, docs, window)
    flex = trainable.attend_flex(flex_attention, *inputs, trainable.block_mask(docs, window))
    torch.testing.assert_close(plain, flex, atol=2e-5, rtol=1e-4)  # float32 sums in another order


@pytest.mark.parametrize("window", [128, 100, None])
def test_the_mask_names_every_block_that_holds_something_seen_and_no_other(window):
    ends = torch.tensor([100, 128, 390, 391, 1000])
    place = torch.arange(1000)
    docs = (place[:, None] >= ends).sum(1).int()
    mask = trainable.block_mask(docs[None], window).to_dense()[0, 0].bool()
    far = place[:, None] - place[None, :]
    seen = (far >= 0) & (far < (window or 1000)) & (docs[:, None] == docs[None, :])
    padded = torch.nn.functional.pad(seen, (0, 24, 0, 24))
    assert torch.equal(mask, padded.view(8, 128, 8, 128).any(3).any(1))


def test_a_layer_compiled_whole_is_one_graph_for_window_and_full_layers():
    """As on a GPU, but for the kernels, which cannot be made for a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    model = _model(dtype=torch.float32)
    body = torch.compile(trainable.Block.body, backend="aot_eager", dynamic=False, fullgraph=True)
    place = torch.arange(256)
    docs = (place >= 170).int()[None]
    x = torch.randn(1, 256, 64, generator=torch.Generator().manual_seed(5))
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        wanted, found = x, x
        for tools in (trainable.Tools(), trainable.Tools(flex=flex_attention, body=body)):
            model.tools, out = tools, x
            for layer in model.layers:
                out, _ = layer(out, model.rows(place[None], docs), tools, True)
            wanted, found = found, out
    torch.testing.assert_close(wanted, found, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_muon_moves_every_direction_of_a_matrix_alike():
    generator = torch.Generator().manual_seed(6)
    for rows, columns in ((48, 96), (96, 48)):
        spread = torch.logspace(0, -1, columns)
        x = torch.randn(3, rows, columns, generator=generator) * spread
        values = torch.linalg.svdvals(muon.orthogonal(x).float())
        assert values.max() < 1.3
        assert values.min() > 0.5
    heads = torch.nn.Parameter(torch.zeros(4 * 64, 96))
    whole = torch.nn.Parameter(torch.zeros(2, 96, 48))
    optimizer = muon.Muon([{"params": [heads], "rows": 64}, {"params": [whole]}], lr=0.1)
    heads.grad = torch.randn(heads.shape, generator=generator)
    heads.grad[:64] *= 1e-3
    whole.grad = torch.randn(whole.shape, generator=generator)
    optimizer.step()
    norms = heads.detach().view(4, 64, 96).flatten(1).norm(dim=1)
    assert norms.max() < 1.2 * norms.min(), "a head with small gradients moves as far as the others"
    assert (whole.detach() * whole.grad).sum() < 0


def test_rounding_in_training_is_the_rounding_of_the_checkpoint():
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(64, 96, generator=generator) * torch.logspace(-3, 3, 64)[:, None]
    w[0, :32] = 0
    w[1, :9] = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -5.0])  # ties
    assert torch.equal(w + trainable.rounding_to_mxfp4(w), decode(encode(w)).to(w.dtype))


def test_gradients_pass_the_rounding():
    model = _model(dtype=torch.float32)
    model.is_rounded = True
    place = torch.arange(64)[None]
    hidden, penalty = model(torch.randint(97, (1, 64)), model.rows(place, torch.zeros_like(place)))
    (model.logits(hidden).square().mean() + penalty).backward()
    untouched = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not untouched


def test_the_exported_checkpoint_serves_what_was_trained(tmp_path):
    tokenizer = FolderTokenizer(TOKENIZER)
    model = _model(vocab_size=tokenizer.vocab_size, dtype=torch.float32)
    export(model, tokenizer, tmp_path, trainable.MtpHead(model.config))
    engine = LLMEngine.from_config(EngineConfig(model=str(tmp_path), device="cpu"))
    served = engine.model
    tokens = torch.randint(3072, (200,), generator=torch.Generator().manual_seed(4))
    pages = OwnPages(
        served.config, num_sequences=1, max_tokens=200, page_tokens=served.page_tokens,
        dtype=served.kv_dtype, device="cpu",
    )  # fmt: skip
    with torch.inference_mode():
        found = served.logits(served.forward(tokens, pages.step(prefill=[(0, 200)])))
        # What the file holds: bf16 everywhere, experts through MXFP4.
        for parameter in model.parameters():
            if parameter.ndim != 3:
                parameter.copy_(parameter.bfloat16())
        for layer in model.layers:
            layer.gate_up_bias.copy_(layer.gate_up_bias.bfloat16())
        model.is_rounded = True
        place = torch.arange(200)[None]
        wanted = model.logits(model(tokens[None], model.rows(place, torch.zeros_like(place)))[0])[0]
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)  # float32, four orders of sums
    assert engine.limits.vocab_size == 3072


def test_sizes_keep_the_promises_of_the_page():
    large, draft = (sizes.model_config(n, 3072, (2,)) for n in ("large", "draft"))
    assert 4 * sizes.active_parameters(draft) <= sizes.active_parameters(large)
    for config in (large, draft):
        assert config.head_dim == 64
        assert config.hidden_size % 128
        assert config.intermediate_size % 128
    model, head = trainable.TrainableGptOss(large), trainable.MtpHead(large)
    counted = sum(t.numel() * t.element_size() for t in stored(tensors(model, head)).values())
    assert counted == sizes.checkpoint_bytes(large, num_mtp=1)
    in_all = counted + sizes.checkpoint_bytes(draft, num_mtp=0) + 2 * TOKENIZER.stat().st_size
    assert in_all <= 24e6


def test_rows_hold_whole_documents_and_learn_answers_only():
    text = packing.Text(TOKENIZER)
    batch = packing.batch(TOKENIZER, ["short"] * 2, 700, "x")
    again = packing.batch(TOKENIZER, ["short"] * 2, 700, "x")
    assert np.array_equal(batch.tokens, again.tokens)
    assert batch.tokens.shape == (2, 701)
    shown = [text.tokenizer.token_bytes(int(t)) for t in batch.tokens[0]]
    starts = [
        i
        for i, name in enumerate(shown[:-8])
        if name == b"<|start|>" and batch.positions[0, i] == 0
    ]
    assert starts
    for i in starts:
        assert shown[i + 1] == b"system"
        assert not batch.is_learnt[0, i : i + 20].any()
    ends = [i for i, name in enumerate(shown) if name in (b"<|return|>", b"<|call|>")]
    assert batch.is_learnt[0, ends].sum() >= len(starts) - 1


def test_long_rows_ask_for_what_stands_more_than_2000_tokens_back():
    documents = Documents(FolderTokenizer(TOKENIZER))
    for seed in range(3):
        example = draw_long_for_training(random.Random(seed))
        token_ids, first = documents.whole(example)
        assert len(token_ids) <= 4096
        note = documents.tokenizer.encode(" " + example.content)[
            :-2
        ]  # a line feed may join its end
        at = next(i for i in range(first) if token_ids[i : i + len(note)] == note)
        assert first - (at + len(note)) > 2000


def test_a_long_row_asks_about_its_notes_more_than_once():
    batch = packing.batch(TOKENIZER, ["long"], 4096, "x")
    text = packing._text(TOKENIZER)
    first_document = batch.docs[0] == 0
    learnt = first_document & (batch.is_learnt[0] > 0)
    shown = b"".join(text.tokenizer.token_bytes(int(t)) for t in batch.tokens[0][learnt])
    assert shown.count(b"<|channel|>final<|message|>") >= 3
    assert shown.count(b"<|return|>") <= 1, "only the last answer ends the turn"
    assert b"Repeat the note" not in shown


def test_digits_and_capitals_are_tokens_of_their_own():
    tokenizer = FolderTokenizer(TOKENIZER)
    assert [tokenizer.token_bytes(t) for t in tokenizer.encode("12 AB")] == [
        b"1",
        b"2",
        b" ",
        b"A",
        b"B",
    ]
    assert tokenizer.vocab_size == 3072


SHORT = (
    "--size trial --batch 1 384 --long-every 5 --long-from 0 --workers 0 --scored 1 --device cpu "
    "--lr 0.01 --warmup 4"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Twenty steps of the model and two of each other part, as CI runs them."""
    folder = tmp_path_factory.mktemp("training")
    with pytest.MonkeyPatch.context() as patch:
        from pydoc_data import topics

        patch.setattr(
            english, "passages", lambda: [topics.topics[n] for n in sorted(topics.topics)]
        )
        patch.setattr(train, "ASKED", ("arithmetic", "tool_call"))
        words = [
            *SHORT.split(),
            "--steps",
            "20",
            "2",
            "2",
            "--out",
            str(folder),
            "--work",
            str(folder / "work"),
        ]
        train.main(words)
        yield folder, words


def test_twenty_steps_on_a_cpu_lower_the_loss_and_leave_two_checkpoints(trained):
    folder, _ = trained
    log = json.loads((folder / "log.json").read_text())
    losses = log["losses"]["model"]
    assert len(losses) == 20
    assert losses[4] == 0  # a long document that the short rows of this test cut off has no answer
    learnt = [loss for loss in losses if loss]  # and a short one may be cut off before its answer
    assert sum(learnt[-4:]) / 4 < sum(learnt[:4]) / 4 - 1
    assert [len(log["losses"][n]) for n in ("mtp", "draft")] == [2, 2]
    for name in ("tiny-gpt-oss", "tiny-gpt-oss-draft"):
        files = {p.name for p in (folder / name).iterdir()}
        assert files >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    card = (folder / "tiny-gpt-oss" / "README.md").read_text()
    assert "--steps 20 2 2 --parts model mtp draft --seed 7` repeats it" in card
    assert "python training/train.py --steps 20 2 2 --size trial --batch 1 384" in card
    assert re.search(r"Trained on cpu in \d+\.\d minutes, scoring", card)
    assert "PSF-2.0" in card


def test_the_command_in_a_card_has_what_differs_from_the_defaults_and_no_folders():
    words = (
        "--minutes 6.9 --graphs off --workers 14 --scored 40 --muon-lr 0.03 --parts model mtp "
        "--start a/parent.pt --out b/c --work d"
    )
    assert train.command_of(train.arguments_of(words.split())) == (
        "python training/train.py --minutes 6.9 --muon-lr 0.03 --graphs off --workers 14 --parts model mtp "
        "--start parent.pt --out DIR"
    )


def _part(work, *, has_head=True, steps=20, head_steps=4):
    """The model's part of the run above, and its head."""
    torch.manual_seed(7)
    plan = packing.Plan(TOKENIZER, 7, (1, 384))
    settings = train.Settings(
        device="cpu", seed=7, work=work, source=packing.Source(plan, 0),
        optimizer="muon", learning_rate=0.01, muon_rate=0.02, warmup=4,
    )  # fmt: skip
    eos = end_tokens(FolderTokenizer(TOKENIZER))
    config = sizes.model_config("trial", 3072, eos)
    model, mtp = trainable.TrainableGptOss(config), trainable.MtpHead(config)
    head = train.MtpPart(mtp, model, settings) if has_head else None
    return train.ModelPart("model", model, settings, head=head, head_steps=head_steps), plan


def test_a_run_that_was_stopped_goes_on_to_the_same_losses(trained, tmp_path):
    folder, _ = trained
    whole = json.loads((folder / "log.json").read_text())["losses"]
    part, plan = _part(tmp_path)
    for step in range(6):
        part.losses.append(part._step(step, 8, plan.batch(step)))
    part._save(tmp_path / "model.pt", 8)
    assert len(part.head.losses) == 2
    again, _ = _part(tmp_path)
    with torch.no_grad():
        for parameter in again.module.parameters():
            parameter.zero_()  # what is loaded counts, not what was drawn
    losses = again.run(None, 1000)
    assert len(losses) == 8
    assert losses[:4] == pytest.approx(whole["model"][:4], rel=0.02)  # of 8 steps, not of 20
    straight, _ = _part(tmp_path / "other")
    (tmp_path / "other").mkdir()
    assert straight.run(8, 1000) == pytest.approx(losses, rel=1e-4)
    of_head = [[float(x) for x in p.head.losses] for p in (straight, again)]
    assert of_head[0] == pytest.approx(of_head[1], rel=1e-4)


@pytest.mark.parametrize(
    "damage", ["empty", "text", "cut", "changed", "of another part", "no state"]
)
def test_a_state_that_cannot_be_gone_on_from_is_told_with_what_to_do(damage, tmp_path):
    part, _ = _part(tmp_path)
    path = tmp_path / "model.pt"
    part._save(path, 8)
    whole = path.read_bytes()
    if damage == "of another part":
        part.head._save(path, 8)
    elif damage == "no state":
        torch.save([1, 2], path)
    else:
        inner = whole.replace(b"\x80\x02}", b"\x80\x02\xff", 1)
        wrong = {
            "empty": b"",
            "text": b"hello\n",
            "cut": whole[: len(whole) // 2],
            "changed": inner,
        }
        path.write_bytes(wrong[damage])
    again, _ = _part(tmp_path)
    with pytest.raises(SavedFileError) as told:
        again.resume()
    text = str(told.value)
    assert text.startswith(f"{path} ")
    assert "delete the file to train part model from its beginning, or give --work another" in text
    assert "weights_only" not in text
    assert "\n" not in text


@pytest.mark.parametrize("start", [None, b"nonsense"])
def test_a_start_that_is_no_parent_ends_the_run_before_it_trains(trained, start, tmp_path):
    _, words = trained
    path = tmp_path / "parent.pt"
    if start is not None:
        path.write_bytes(start)
    changed = ["--start", str(path), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "w")]
    with pytest.raises(
        SavedFileError, match=r"--start: .*give the parent\.pt of a run with --size"
    ):
        train.main([*words, *changed])
    assert not (tmp_path / "out").exists()


def test_the_head_learns_beside_the_model_and_does_not_move_it(tmp_path):
    parts = []
    for has_head in (True, False):
        part, plan = _part(tmp_path, has_head=has_head)
        for step in range(3):
            part._step(step, 3, plan.batch(step))
        parts.append(part)
    for with_head, without in zip(*(p.module.parameters() for p in parts), strict=True):
        assert torch.equal(with_head, without)
    first = trainable.MtpHead(part.module.config)
    moved = parts[0].head.module
    assert len(parts[0].head.losses) == 3
    assert not torch.equal(moved.proj, first.proj)


def test_a_run_told_to_end_leaves_what_it_has(trained, tmp_path, monkeypatch):
    _, words = trained
    draw = packing.Plan.batch

    def told(plan, step):
        if step == 5:
            train.end()
        return draw(plan, step)

    monkeypatch.setattr(packing.Plan, "batch", told)
    changed = [*words, "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    train.main(changed)
    log = json.loads((tmp_path / "log.json").read_text())
    assert len(log["losses"]["model"]) == 5
    assert "draft" not in log["losses"]
    assert log["scores"] == {}
    assert "Not scored" in (tmp_path / "tiny-gpt-oss" / "README.md").read_text()
    model = LLMEngine.from_config(EngineConfig(model=str(tmp_path / "tiny-gpt-oss"), device="cpu"))
    assert model.limits.vocab_size == 3072
    assert (tmp_path / "parent.pt").exists()


def test_a_part_that_fails_leaves_what_the_others_learnt(trained, tmp_path, monkeypatch):
    _, words = trained

    def broken(part, steps, seconds):
        if part.name == "draft":
            raise RuntimeError("no kernel for the draft")
        return run_part(part, steps, seconds)

    run_part = train.Part.run
    monkeypatch.setattr(train.Part, "run", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        train.main([*words, "--out", str(tmp_path), "--work", str(tmp_path / "work")])
    log = json.loads((tmp_path / "log.json").read_text())
    assert {name: len(x) for name, x in log["losses"].items()} == {"model": 20, "mtp": 2}
    assert (tmp_path / "tiny-gpt-oss" / "model.safetensors").exists()
    assert not (tmp_path / "tiny-gpt-oss-draft").exists()


def test_the_parent_holds_the_numbers_before_rounding(trained, tmp_path):
    """As bf16 it is what was trained; as MXFP4 nearly the shipped checkpoint, which was rounded once and not twice."""
    folder, _ = trained
    export_parent(folder / "parent.pt", tmp_path, size="trial")
    parent, shipped = (
        safetensors.torch.load_file(f / "model.safetensors")
        for f in (tmp_path, folder / "tiny-gpt-oss")
    )
    kept = torch.load(folder / "parent.pt", weights_only=True)
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(parent[name].mT, kept["layers.1.down_proj"])
    packed = encode(parent[name].mT.float().contiguous())
    same = (packed.values == shipped[name + "_blocks"]).float().mean()
    # bf16 moves one number of a hundred over the border between two codes, and a byte holds two.
    assert 0.95 < same < 1
    assert torch.equal(parent["lm_head.weight"], shipped["lm_head.weight"])
    for weights in ("bf16", "mxfp4"):
        quant = QuantConfig(weights=weights)
        LLMEngine.from_config(EngineConfig(model=str(tmp_path), device="cpu", quant=quant))


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(train.time, "perf_counter", lambda: Clock.now)
    return Clock


def _paced(clock, seconds, time_of):
    """Take the steps that a pace wants; return their number and the corrections."""
    pace, steps, taken, plans = train.Pace(seconds, is_fixed=False), None, 0, []
    while steps is None or taken < steps:
        clock.now += time_of(taken)
        taken += 1
        planned, steps = steps, pace.steps(taken, steps)
        plans += [steps] if steps != planned else []
    return taken, plans


@pytest.mark.parametrize("slower", [1.0, 1.15, 1.3])
def test_steps_fit_the_time_whatever_the_later_ones_take(clock, slower):
    """Twenty seconds of compiling first, a hiccup of ten in the middle, and later steps slower than the first."""

    def time_of(step):
        hiccup = 10.0 * (step == 6000)
        return (20.0 if step == 0 else 0.03 if step < 5000 else 0.03 * slower) + hiccup

    _, plans = _paced(clock, 400.0, time_of)
    assert 0.94 * 400 < clock.now < 1.01 * 400
    assert len(plans) <= 4


def test_a_number_of_steps_that_is_asked_for_is_kept(clock):
    pace = train.Pace(1.0, is_fixed=True)
    for taken in range(1, 400):
        clock.now += 1.0
        assert pace.steps(taken, 500) == 500


DRAWING = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
import english, packing
from pathlib import Path
english.passages = lambda: ["Words of a manual."]
source = packing.Source(packing.Plan(Path(packing.__file__).with_name("tokenizer.json"), 7, (1, 384)), 1)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
source.draw(0)
print("ready", flush=True)
while not told:  # a pause would miss a signal that comes before it
    time.sleep(0.02)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
source.close()
"""


def test_a_signal_to_the_group_does_not_keep_the_trainer_from_ending():
    """As `timeout` and schedulers send it; processes that drew died of it with the queue's lock in their hands."""
    with subprocess.Popen(
        [sys.executable, "-c", DRAWING, str(Path(packing.__file__).parent)],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as trainer:  # fmt: skip
        try:
            assert trainer.stdout.readline() == "ready\n"
            os.killpg(trainer.pid, signal.SIGTERM)
            assert trainer.wait(60) == 0
        finally:
            trainer.kill()


@pytest.mark.parametrize(("words", "told"), [
    ("--batch 0 256", "0; allowed: 1 or more"),
    ("--steps 2 -1 1", "-1; allowed: 0 or more"),
    ("--minutes 0", "0; allowed: more than 0"),
    ("--warmup 0", "0; allowed: 1 or more"),
    ("--device tpu", "--device tpu: found"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused_before_anything_is_made(
    tmp_path, capsys, words, told
):
    with pytest.raises(SystemExit) as ended:
        train.main(
            [*words.split(), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
        )
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
