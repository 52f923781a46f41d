"""On the embedded model: formats agree, broken models are told from honest ones, stored values are compared."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import torch

from rose.cli.main import run
from rose.cli.serve import EMBEDDED_MODEL
from rose.config.engine import EngineConfig
from rose.config.quant import QuantConfig
from rose.engine.engine import LLMEngine
from rose.eval import logprobs, variants
from rose.eval.rendering import Documents
from rose.eval.tasks import held_out_set
from rose.frontend.tokenizer import load_tokenizer
from rose.models.gpt_oss import reference
from rose.models.gpt_oss.original import reference_config, weights_of
from rose.models.gpt_oss.weights import load, read_config
from rose.utils.errors import CheckpointError

FACTOR = 10
"""A broken model is this much farther away than the worst honest one."""
FORMATS = ("mxfp4", "bf16", "fp8_block")
NUM_TOKENS = 400
"""Three windows: enough for positions and windows to matter, few enough for float64 on a CPU."""


class Right:
    """The float64 reference of the embedded model on a text, and ways to be compared with it."""

    def __init__(self):
        self.tokenizer = load_tokenizer(EMBEDDED_MODEL)
        documents = self.documents = Documents(self.tokenizer)
        token_ids = []
        for task in ("tool_call", "far_copy", "arithmetic", "tool_result", "instruction", "turns"):
            token_ids += documents.whole(held_out_set(task, 1, seed=9)[0])[0]
        self.token_ids = token_ids[:NUM_TOKENS]
        config = read_config(EMBEDDED_MODEL)
        quant = QuantConfig(weights="mxfp4", activations="float64", kv="float64")
        self.weights = weights_of(load(EMBEDDED_MODEL, config, quant), torch.float64)
        self.config = reference_config(config)
        self.logits, self.found = self.reference(), {}
        # float32 for answers: half the time, and no choice is that close.
        self.narrow = {name: w.float() for name, w in self.weights.items()}

    def reference(self, num_tokens=NUM_TOKENS):
        return reference.forward(
            self.config, self.weights, torch.tensor(self.token_ids[:num_tokens])
        )

    def served(self, weights, activations):
        quant = QuantConfig(weights=weights, activations=activations)
        config = EngineConfig(model=str(EMBEDDED_MODEL), device="cpu", quant=quant)
        model = LLMEngine.from_config(config).model
        return logprobs.mean_kl(self.logits, logprobs.served_logits(model, self.token_ids))

    def broken(self, name):
        if name not in self.found:
            with variants.BROKEN[name]():
                self.found[name] = logprobs.mean_kl(self.logits, self.reference())
        return self.found[name]

    def num_answered(self, wholes):
        """Answers whose every token is the reference's first choice: what greedy decoding would write."""
        found = 0
        for token_ids, first in wholes:
            logits_TV = reference.forward(self.config, self.narrow, torch.tensor(token_ids))
            found += logits_TV[first - 1 : -1].argmax(-1).tolist() == token_ids[first:]
        return found


@pytest.fixture(scope="module")
def right():
    return Right()


@pytest.fixture(scope="module")
def worst_honest(right):
    """The worst weight format by activations: float32, as a CPU serves, and bf16, as a GPU does."""
    return {a: max(right.served(w, a) for w in FORMATS) for a in ("float32", "bf16")}


def test_formats_give_the_reference_on_a_cpu(worst_honest):
    # Every format holds this checkpoint's numbers without loss; what is left is float32's rounding.
    assert worst_honest["float32"] < 1e-8


@pytest.mark.parametrize("name", variants.BROKEN)
def test_a_broken_model_is_far_from_the_worst_format(right, worst_honest, name):
    assert right.broken(name) > FACTOR * worst_honest["float32"]


@pytest.mark.parametrize("name", ["sinks ignored", "routing over all experts"])
def test_lost_sinks_and_wrong_routing_are_far_even_from_bf16_activations(right, worst_honest, name):
    """Rounding as a GPU does it; a window too wide by one and truncated YaRN drown in it (docs/training.md)."""
    assert right.broken(name) > FACTOR * worst_honest["bf16"]


def test_mistakes_are_taken_back(right):
    for mistake in variants.BROKEN.values():
        with mistake():
            assert not torch.equal(right.reference(num_tokens=140), right.logits[:140])
    torch.testing.assert_close(right.reference(num_tokens=140), right.logits[:140])


@pytest.mark.parametrize(
    ("name", "task", "count"),
    [("sinks ignored", "sort", 24), ("routing over all experts", "sort", 24)],
)
def test_sinks_and_routing_cost_answers(right, name, task, count):
    """Of 23 right answers sinks cost five and wrong routing three: more than one answer that rounding could turn."""
    wholes = [right.documents.whole(example) for example in held_out_set(task, count, seed=9)]
    answered = right.num_answered(wholes)
    with variants.BROKEN[name]():
        assert right.num_answered(wholes) <= answered - 2


def test_routing_weights_in_bf16_move_less_than_wrong_routing(right):
    with variants.routing_in_bf16():
        moved = logprobs.mean_kl(right.logits, right.reference())
    assert 0 < moved < right.broken("routing over all experts") / FACTOR


@pytest.fixture
def short_texts(monkeypatch):
    monkeypatch.setattr(
        logprobs, "fixed_texts", lambda t: {"english": t.encode("A short text. " * 9)}
    )


def test_stored_log_probabilities_are_those_of_the_served_model(right, short_texts, tmp_path):
    logprobs.store(tmp_path, right.config, right.weights, right.tokenizer)
    model = LLMEngine.from_config(EngineConfig(model=str(EMBEDDED_MODEL), device="cpu")).model
    [line] = logprobs.compare(tmp_path, model, right.tokenizer).values()
    assert line["largest_difference"] < 1e-3  # float32 against float64, and six stored digits
    assert line["perplexity"] > 1
    values = json.loads((tmp_path / logprobs.FILE_NAME).read_text())
    values["texts"]["english"]["tokens"] = "others"
    (tmp_path / logprobs.FILE_NAME).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="stored for other tokens"):
        logprobs.compare(tmp_path, model, right.tokenizer)
    for damaged in (b"\x89PNG", b"[]", b'{"texts": {"english": 3}}'):
        (tmp_path / logprobs.FILE_NAME).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"logprobs\.json cannot be read"):
            logprobs.compare(tmp_path, model, right.tokenizer)


@pytest.fixture
def only_english(right, monkeypatch):
    """All fixed texts; what is compared from here on is the shortest, which is enough to tell the weights."""
    texts = logprobs.fixed_texts(right.tokenizer)
    monkeypatch.setattr(logprobs, "fixed_texts", lambda t: {"english": texts["english"]})
    return texts


def test_the_values_that_ship_are_of_these_texts_and_of_this_model(right, only_english):
    stored = json.loads((EMBEDDED_MODEL / logprobs.FILE_NAME).read_text())["texts"]
    assert {name: t["tokens"] for name, t in stored.items()} == {
        name: logprobs._digest(token_ids) for name, token_ids in only_english.items()
    }
    model = LLMEngine.from_config(EngineConfig(model=str(EMBEDDED_MODEL), device="cpu")).model
    [line] = logprobs.compare(EMBEDDED_MODEL, model, right.tokenizer).values()
    assert line["largest_difference"] < 1e-3  # as above


def test_one_fixed_text_is_longer_than_3000_tokens():
    from rose.frontend.tokenizer import FolderTokenizer

    tokenizer = FolderTokenizer(EMBEDDED_MODEL / "tokenizer.json")
    assert len(logprobs.fixed_texts(tokenizer)["long"]) > 3000


def test_the_command_compares_formats_and_writes_json(only_english, tmp_path, capsys):
    path = tmp_path / "r.json"
    words = "eval --task arithmetic --task tool_call --task texts --count 2 --device cpu --weights mxfp4 --weights bf16"
    assert run([*words.split(), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert set(found["tasks"]) == {"arithmetic", "tool_call", "harmony"}
    assert [r["weights"] for r in found["runs"]] == ["mxfp4", "bf16"]
    # Both hold the same numbers here, so they answer alike.
    assert found["runs"][0]["tasks"] == found["runs"][1]["tasks"]
    assert found["runs"][1]["texts"]["english"]["largest_difference"] < 1e-3
    assert "bf16 - mxfp4" in capsys.readouterr().out.replace("\n", "")


def test_only_what_was_asked_for_is_computed(only_english, tmp_path, capsys, monkeypatch):
    path = tmp_path / "r.json"
    command = ["eval", "--device", "cpu", "--json", str(path)]
    assert run([*command, "--task", "texts"]) == 0
    found = json.loads(path.read_text())
    assert (found["num_questions"], found["tasks"]) == (0, {})
    assert found["texts"]["english"]["perplexity"] > 1
    assert "perplexity, english" in capsys.readouterr().out
    monkeypatch.setattr(logprobs, "compare", lambda *_: pytest.fail("texts were not asked for"))
    assert run([*command, "--task", "copy", "--count", "1"]) == 0
    found = json.loads(path.read_text())
    assert (found["num_questions"], found["texts"]) == (1, {})
    assert "perplexity" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--store", "--task", "copy", "--count", "3"], "and --count, --task would mean nothing"),
        (["--task", "texts", "--count", "20"], "asks no questions, and --count would mean"),
        (["--task", "texts", "--seed", "1", "--count", "2"], "and --count, --seed would mean"),
        (["--url", "http://x", "--device", "cpu"], "--url was given with --device"),
        (["--api-key", "x"], "--api-key was given without --url"),
        (["--device", "tpu"], "allowed: auto, cpu, cuda; change --device"),
        (["--weights", "fp9"], "'fp8_block', 'fp8_block_all'"),
        (["--json", f"{__file__}/x"], f"{__file__} is a file"),
    ],
)
def test_options_that_would_mean_nothing_are_refused_before_anything_is_asked(words, said, capsys):
    assert run(["eval", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_server_is_asked_for_no_texts(capsys):
    assert run(["eval", "--task", "texts", "--url", "http://x"]) == 2
    assert "--task texts was given with --url" in capsys.readouterr().err


def test_a_task_that_is_unknown_and_a_server_with_weights_are_refused(capsys):
    assert run(["eval", "--task", "chess", "--url", "http://x", "--weights", "bf16"]) == 2
    said = capsys.readouterr().err
    assert "'chess' is not known" in said
    assert "--url was given with" in said
