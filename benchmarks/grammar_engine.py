"""Constrained sequences in a whole engine: checked, then timed beside free ones. For a GPU; --size tiny runs on a CPU.

    PYTHONPATH=src python benchmarks/grammar_engine.py --size 20b --layers 4 --device cuda [--json FILE]

Needs llguidance beside the engine's packages, and no tokenizer: the first 256 tokens stand for the bytes. The checks:
every constrained answer is JSON of the schema, graphs and eager steps give the same answers, free sequences give the
same tokens whether others are constrained or not. Then one JSON line: time and tokens per step of both kinds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rose.bench.build import BenchSetup, build_engine, build_model, setup
from rose.bench.record import Origin, append
from rose.engine.engine import LLMEngine
from rose.models.gpt_oss.model import GptOss
from rose.protocol.event import FinishedEvent, FromEngine, TokensEvent
from rose.protocol.grammar import Constraint, Grammar, Vocabulary, vocabulary_key
from rose.protocol.request import Request
from rose.protocol.sampling_params import SamplingParams

CONTROL = 4
"""Control tokens after the bytes; the last ends an answer."""
END = 256 + CONTROL - 1
SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["one", "two"]},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 4,
        },
    },
    "required": ["word", "kind", "numbers"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def vocabulary(vocab_size: int) -> Vocabulary:
    """Bytes, four control tokens, and ids without a text up to the model's vocabulary."""
    tokens = [bytes([i]) for i in range(256)] + [b"<%d>" % i for i in range(CONTROL)]
    tokens += [b""] * (vocab_size - len(tokens))
    control = list(range(256, 256 + CONTROL))
    return Vocabulary(
        key=vocabulary_key(tokens, control, END), tokens=tokens, control_ids=control, end_id=END
    )


def requests(
    known: Vocabulary, num_free: int, num_held: int, *, num_tokens: int, temperature: float
) -> list[Request]:
    """Free and constrained requests with seeds of their own."""
    text = f"start: %json {json.dumps(SCHEMA)} <[{END}]>"
    constraint = Constraint(
        vocabulary=known.key, grammars=[Grammar(text=text, starts=[[]])], banned_ids=[]
    )
    made = []
    for kind, count in (("free", num_free), ("held", num_held)):
        for i in range(count):
            made.append(
                Request(
                    request_id=f"{kind}-{i}",
                    prompt_token_ids=[(7 * i + j) % 256 for j in range(100 + i)],
                    max_tokens=num_tokens,
                    sampling=SamplingParams(temperature=temperature, seed=i),
                    stop_token_ids=[END] if kind == "held" else [],
                    constraint=constraint if kind == "held" else None,
                )
            )
    return made


def run(engine: LLMEngine, asked: list[Request]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Run requests to their end; return their tokens, and the times of steps in which nothing was prefilled."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in asked}
    reasons: dict[str, str] = {}
    for request in asked:
        refused = engine.add(request)
        assert not refused, refused
    steps, counts = [], {"free": 0, "held": 0}
    while engine.has_work:
        num_prompt = engine.counters.num_prompt_tokens
        begin = time.perf_counter()
        events: list[FromEngine] = engine.step()
        seconds = time.perf_counter() - begin
        for event in events:
            if isinstance(event, TokensEvent):
                tokens[event.request_id] += event.token_ids
            elif isinstance(event, FinishedEvent):
                reasons[event.request_id] = event.reason
            else:
                raise AssertionError(event)
        if engine.counters.num_prompt_tokens == num_prompt and len(engine.running_ids()) == len(
            asked
        ):
            steps.append(seconds)
            for event in events:
                if isinstance(event, TokensEvent):
                    counts[event.request_id.partition("-")[0]] += 1
    for name, found in tokens.items():
        if name.startswith("held") and reasons[name] == "stop":
            check_answer(found)
    return tokens, {"steps": steps, "counts": counts, "reasons": reasons}


def check_answer(token_ids: list[int]) -> None:
    """Fail where an answer that ended is no JSON of the schema."""
    assert token_ids[-1] == END, token_ids
    value = json.loads(bytes(token_ids[:-1]))
    assert set(value) == set(SCHEMA["required"]), value
    assert isinstance(value["word"], str), value
    assert len(value["word"]) <= 12, value
    assert value["kind"] in ("one", "two"), value
    assert len(value["numbers"]) <= 4, value
    assert all(isinstance(n, int) and 0 <= n <= 99 for n in value["numbers"]), value


def engine_of(
    model: GptOss, bench: BenchSetup, *, use_graphs: bool
) -> tuple[LLMEngine, Vocabulary]:
    """Build an engine around the model that knows the vocabulary."""
    config = dataclasses.replace(bench.config, use_graphs=use_graphs)
    engine = build_engine(model, dataclasses.replace(bench, config=config))
    known = vocabulary(model.config.vocab_size)
    begin = time.perf_counter()
    engine.learn(known)
    print(f"vocabulary learnt in {time.perf_counter() - begin:.2f} s", flush=True)
    return engine, known


def checked(model: GptOss, bench: BenchSetup) -> list[str]:
    """Run the checks; return in words what held."""
    held = []
    engine, known = engine_of(model, bench, use_graphs=bench.config.use_graphs)
    asked = requests(known, 6, 10, num_tokens=96, temperature=1.0)
    tokens, found = run(engine, asked)
    ended = [n for n, r in found["reasons"].items() if n.startswith("held") and r == "stop"]
    assert len(ended) == 10, found["reasons"]
    held.append("10 of 10 constrained answers are JSON of the schema")
    alone, _ = run(engine, [r for r in asked if r.constraint is None])
    same = sum(alone[name] == tokens[name] for name in alone)
    held.append(f"{same} of {len(alone)} free answers are the same without constrained neighbours")
    if bench.config.use_graphs:
        del engine
        eager, known = engine_of(model, bench, use_graphs=False)
        again, _ = run(eager, asked)
        same = sum(again[name] == tokens[name] for name in tokens)
        held.append(f"{same} of {len(tokens)} answers are the same without graphs")
    return held


def timed(model: GptOss, bench: BenchSetup, num_free: int, num_held: int) -> dict[str, Any]:
    """Time steps of a warm engine, free sequences alone and beside constrained ones."""
    engine, known = engine_of(model, bench, use_graphs=bench.config.use_graphs)
    both = requests(known, num_free, num_held, num_tokens=48, temperature=0.0)
    free = [r for r in both if r.constraint is None]
    line: dict[str, Any] = {"free": num_free, "constrained": num_held}
    for name, asked in (("warm", both), ("free", free), ("both", both)):
        _, found = run(engine, asked)
        steps = found["steps"]
        if name == "warm" or not steps:
            continue
        line[f"{name}_step_ms"] = round(1e3 * statistics.median(steps), 3)
        line[f"{name}_tokens_per_step"] = {
            kind: round(count / len(steps), 2) for kind, count in found["counts"].items()
        }
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="20b", choices=("20b", "120b", "tiny"))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--weights", default="mxfp4")
    parser.add_argument("--free", type=int, default=32)
    parser.add_argument("--constrained", type=int, default=32)
    parser.add_argument("--json", type=Path, help="append the line to this file")
    parser.add_argument("--commit")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    bench = setup(
        size=options.size,
        weights=options.weights,
        device=options.device,
        layers=options.layers,
        kv_tokens=65_536,
        graphs=options.device == "cuda",
    )
    model = build_model(bench)
    line: dict[str, Any] = {
        "bench": "grammar_engine",
        "size": options.size,
        "layers": options.layers,
    }
    line["checks"] = checked(model, bench)
    print("\n".join(line["checks"]), flush=True)
    line |= timed(model, bench, options.free, options.constrained)
    line = Origin.here(
        device=bench.device.name, config=bench.name, commit=options.commit,
        command=shlex.join(["python", "benchmarks/grammar_engine.py", *sys.argv[1:]]),
    ).stamp(line)  # fmt: skip
    print(json.dumps(line))
    append(options.json, line)


if __name__ == "__main__":
    main()
