"""CPU cost of grammars: a mask alone, many side by side, and whole steps of an engine without a model.

Run it as
    PYTHONPATH=src python benchmarks/grammar_masks.py [--sequences 128] [--steps 400]
and it prints JSON lines. What runs on one thread is given as CPU time, so that other work on the machine counts little.
The vocabulary is o200k_harmony, the schema the one below, the text a JSON answer of it. In the step a sleep of 5 ms
plays the device: about a decode step of gpt-oss-20b at 32 rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator

import torch
from llguidance import LLExecutor

from rose.bench.scheduler import NullDecoder, build_null, cpu_name
from rose.decoders.results import Sampled
from rose.engine.matchers import Matcher, TokenTrie, masks
from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.formatters.shape import AnswerShape
from rose.frontend.o200k import VOCAB_SIZE, O200kTokenizer
from rose.protocol.event import TokensEvent
from rose.protocol.grammar import Constraint, Grammar
from rose.protocol.request import Request

DEVICE_S = 0.005
ANSWER = {
    "title": "The Old Man and the Sea",
    "kind": "book",
    "year": 1952,
    "rating": 8.5,
    "tags": ["novella", "sea", "classic"],
    "author": {"name": "Ernest Hemingway", "born": 1899},
    "released": "1952-09-01",
    "summary": 'An old fisherman, out of luck for 84 days, hooks a "great" marlin far out in the Gulf Stream.',
    "is_new": False,
}
TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": TEXT,
        "kind": {"enum": ["book", "film", "song"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "rating": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 10}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}},
        "author": {"$ref": "#/$defs/person"},
        "released": {"type": "string", "format": "date"},
        "summary": {"type": "string", "maxLength": 400},
        "is_new": {"type": "boolean"},
    },
    "required": list(ANSWER),
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"name": TEXT, "born": {"type": ["integer", "null"]}},
            "required": ["name", "born"],
            "additionalProperties": False,
        }
    },
}


class Bench:
    """What the measurements share."""

    def __init__(self) -> None:
        self.tokenizer = O200kTokenizer()
        formatter = HarmonyFormatter(self.tokenizer)
        begin = time.thread_time()
        self.vocabulary = formatter.vocabulary()
        told = time.thread_time()
        self.trie = TokenTrie(self.vocabulary, VOCAB_SIZE)
        self.trie.build()
        self.seconds = {"vocabulary_s": told - begin, "trie_s": time.thread_time() - told}
        rules = formatter.rules(AnswerShape(content=SCHEMA))
        assert rules is not None, "a schema is a form"
        self.constraint = Constraint(
            vocabulary=self.vocabulary.key,
            grammars=[
                Grammar(text=r.text, starts=[list(s) for s in r.starts]) for r in rules.rules
            ],
            banned_ids=list(rules.banned_ids),
        )
        text = json.dumps(ANSWER)
        self.answer = self.tokenizer.encode_with_control(
            f"<|channel|>final<|message|>{text}<|return|>"
        )

    def matcher(self) -> Matcher:
        return self.trie.matcher(self.constraint.grammars[0].text)

    def alone(self) -> dict[str, float]:
        """Follow the answer five times; the first time fills the caches of the library's lexer."""
        build = time.thread_time()
        self.matcher()
        build = time.thread_time() - build
        times, takes = [], []
        for _ in range(5):
            matcher = self.matcher()
            for token in self.answer:
                begin = time.thread_time()
                matcher.mask()
                middle = time.thread_time()
                matcher.take(token)
                times.append(1e6 * (middle - begin))
                takes.append(1e6 * (time.thread_time() - middle))
        times.sort()
        return {
            "what": "one mask alone",
            "tokens": len(self.answer),
            "build_ms": 1e3 * build,
            "mask_median_us": statistics.median(times),
            "mask_mean_us": statistics.mean(times),
            "mask_p99_us": times[len(times) * 99 // 100],
            "mask_max_us": times[-1],
            "take_median_us": statistics.median(takes),
            "mask_bytes": self.trie.mask_bytes,
        }

    def together(self, count: int) -> dict[str, float]:
        executor = LLExecutor(min(8, os.cpu_count() or 1))
        matchers = [self.matcher() for _ in range(count)]
        # each at another place of the answer, as in life
        for i, matcher in enumerate(matchers):
            for token in self.answer[: i % len(self.answer)]:
                matcher.take(token)
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            masks(matchers, executor)
            times.append(1e6 * (time.perf_counter() - begin))
        return {"what": f"{count} masks side by side", "all_median_us": statistics.median(times)}

    def step(self, num_sequences: int, num_constrained: int, num_steps: int) -> dict[str, float]:
        """Steps of an engine: host time of each, and the tokens that free and constrained sequences get per step."""
        engine = build_null(num_sequences, num_steps + 200, is_caching=True)
        engine.decoder = _Follower(engine.decoder, self.answer)
        engine.learn(self.vocabulary)
        answers = 0

        def request(name: str, constraint: Constraint | None) -> Request:
            return Request(
                request_id=name,
                prompt_token_ids=[1] * 64,
                max_tokens=num_steps + 100,
                constraint=constraint,
                stop_token_ids=[self.answer[-1]],
            )

        for i in range(num_sequences):
            held = i < num_constrained
            engine.add(
                request(f"{'held' if held else 'free'}-{i}", self.constraint if held else None)
            )
        while engine.grammars.is_busy or engine.scheduler.waiting:
            engine.step()
        host, tokens = [], {"held": 0, "free": 0}
        for _ in range(num_steps):
            engine.decoder.waited = 0.0
            begin = time.perf_counter()
            events = engine.step()
            host.append(1e6 * (time.perf_counter() - begin - engine.decoder.waited))
            for event in events:
                kind = event.request_id.partition("-")[0]
                if isinstance(event, TokensEvent):
                    tokens[kind] += 1
                else:
                    answers += 1
                    engine.add(request(f"held-again-{answers}", self.constraint))
        num_free = num_sequences - num_constrained
        return {
            "what": f"step of {num_sequences} sequences, {num_constrained} constrained",
            "host_median_us": statistics.median(host),
            "host_p99_us": sorted(host)[len(host) * 99 // 100],
            "free_tokens_per_step": tokens["free"] / num_steps / max(1, num_free),
            "held_tokens_per_step": tokens["held"] / num_steps / max(1, num_constrained),
        }


class _Follower:
    """Plays a device that takes DEVICE_S per step and samples the answer's next token where a mask asks for it."""

    can_overlap = True
    model = None

    def __init__(self, inner: NullDecoder, answer: list[int]) -> None:
        self._inner = inner
        self._answer = answer
        self._place: dict[int, int] = {}
        self._ready = 0.0
        self.waited = 0.0

    def launch(self, plan):
        for entry in plan.prefill:
            if entry.is_new:
                self._place.pop(entry.slot, None)
        for slot, mask in plan.masks.items():
            if mask is not None:
                self._place.setdefault(slot, 0)
        tokens = []
        for slot in plan.sample_slots:
            place = self._place.get(slot)
            tokens.append(1 if place is None else self._answer[place])
            if place is not None:
                self._place[slot] = (place + 1) % len(self._answer)
        self._inner.sampled = Sampled(torch.tensor(tokens), None)
        handle = self._inner.launch(plan)
        self._ready = max(self._ready, time.perf_counter()) + DEVICE_S
        return handle, self._ready

    def collect(self, handle):
        inner, ready = handle
        begin = time.perf_counter()
        time.sleep(max(0.0, ready - begin))
        self.waited += time.perf_counter() - begin
        return self._inner.collect(inner)


def lines(num_sequences: int, num_steps: int) -> Iterator[dict[str, float]]:
    bench = Bench()
    yield {"what": "once per server", **bench.seconds}
    yield bench.alone()
    for count in (1, 16, num_sequences):
        yield bench.together(count)
    for count in (0, 1, num_sequences // 8, num_sequences):
        yield bench.step(num_sequences, count, num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}
    for line in lines(options.sequences, options.steps):
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}
        print(json.dumps({"bench": "grammars", **shown, **machine}))


if __name__ == "__main__":
    main()
