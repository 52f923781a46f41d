"""A fuzzer of what models write: token sequences from well-formed to absurd, and what must hold for each of them.

Must hold: nothing raises, no text is lost, and neither the cut into pushes nor streaming changes the answer.
Knows no pytest; `tests/frontend/formatters/harmony/test_fuzz.py` runs a share of it, `make soak` a million.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from rose.frontend.chat import ChatFold, ChatWriter
from rose.frontend.formatters.base import Delta
from rose.frontend.formatters.harmony.answer import SEPARATOR, HarmonyDecoder
from rose.frontend.formatters.harmony.parse import HarmonyParser
from rose.frontend.generation import ChoiceRun, Job, Piece
from rose.frontend.schemas import encode
from rose.frontend.sse import sse_lines
from rose.frontend.tokenizer import Tokenizer, decode
from rose.protocol.event import TokensEvent

DECLARED = ("ping", "get_weather")
REASONS = ("stop", "stop", "length", "abort")
MARKER = re.compile(r"zq\d+z")
"""Words that no format knows: wherever one stands in the text between control tokens, it must come out again."""

CONTROL = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|constrain|>", "<|endoftext|>", "<|reserved_200013|>"),
)
WORDS = (
    *("assistant", "analysis", "commentary", "final", " to=", "functions", ".", "ping", " ping"),
    *("to=functions.get_weather", "json", " json", " code", "user", "tool", "assistantfinal"),
    *(
        "functions.ping to=assistant",
        "commentaryto=",
        "––",
        ":",
        " ",
        "\n",
        "{}",
        "python",
        "Final",
    ),
)
TEXTS = (
    *(
        "Hi",
        "{}",
        '{"city":"Paris"}',
        "é",
        "𠮷",
        "こんにちは",
        "a\n\nb",
        "👩‍👩‍👧",
        "",
        " ",
        "\ufeff",
        "\x00",
    ),
    *("<|end|>", "to=functions.ping", "assistant", "final", "x" * 40, "# Title\r\n"),
)
HEADERS = (
    *("<|channel|>analysis", "<|channel|>final", "<|channel|>commentary", "", "<|channel|>odd"),
    *(
        "<|channel|>commentary to=functions.ping <|constrain|>json",
        " to=ping<|channel|>analysis code",
    ),
    *(" to=functions.get_weather<|channel|>commentary", "<|channel|>final <|constrain|>json"),
    *(
        "<|channel|>commentary to=functions.ping<|channel|>commentary",
        "<|channel|>analysis to=python",
    ),
)


class Generator:
    """Sequences of one seed: the same seed makes the same sequences on every machine."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._draw = random.Random(seed)
        encode = tokenizer.encode_with_control
        self._control = [encode(name)[0] for name in CONTROL]
        self._words = [encode(word) for word in WORDS]
        self._texts = [tokenizer.encode(text) for text in TEXTS]
        self._headers = [encode(text) for text in HEADERS]
        self._markers = [tokenizer.encode(f"{' ' * (i % 2)}zq{i}z") for i in range(90)]
        self._start = encode("<|start|>assistant")
        self._message, self._ends = encode("<|message|>"), [encode(c)[0] for c in CONTROL[3:6]]
        self._vocab_size = tokenizer.vocab_size

    def sequences(self) -> Iterator[list[int]]:
        """Yield sequences for ever: random ones, and mutated well-formed ones cut at every position."""
        while True:
            for _ in range(20):
                yield self._random()
            for _ in range(2):
                whole = self._mutated(self._well_formed())
                yield from (whole[:end] for end in range(len(whole) + 1))

    def _text(self) -> list[int]:
        pools = (self._texts, self._markers)
        return [token for _ in range(self._draw.randint(0, 2)) for token in self._pick(*pools)]

    def _pick(self, *pools: Sequence[list[int]]) -> list[int]:
        return self._draw.choice(self._draw.choice(pools))

    def _well_formed(self) -> list[int]:
        draw, found = self._draw, []
        for number in range(draw.randint(1, 3)):
            found += self._start if number or draw.random() < 0.1 else []
            found += [*draw.choice(self._headers), *self._message, *self._text()]
            found.append(draw.choice(self._ends))
        return found

    def _mutated(self, tokens: list[int]) -> list[int]:
        draw = self._draw
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            place, end = sorted(draw.randint(0, len(tokens)) for _ in range(2))
            end = min(end, place + 4)
            tokens[place:end] = draw.choice(
                (
                    lambda: [],
                    lambda: [draw.choice(self._control)],
                    lambda: self._pick(self._words, self._markers),
                    lambda cut=tokens[place:end]: cut * 2,
                    lambda cut=tokens[place:end]: cut[::-1],
                    lambda: [draw.randrange(self._vocab_size)],
                )
            )()
        return tokens

    def _random(self) -> list[int]:
        """Make a sequence from plausible to absurd: control tokens, header words, any ids, ids of no vocabulary."""
        draw = self._draw
        found: list[int] = []
        weights = [draw.random() * weight for weight in (4, 4, 1, 1, 2, 0.2)]
        long = draw.random() < 0.02
        size = draw.choice((70, 140, 300)) if long else draw.randint(0, 24)
        for kind in draw.choices(range(6), weights, k=size):
            if kind == 0:
                found.append(draw.choice(self._control))
            elif kind in (1, 2):
                found += draw.choice((self._words, self._markers)[kind - 1])
            elif kind == 3:
                found.append(draw.randrange(256))  # single bytes: broken characters
            else:
                found.append(draw.randrange(self._vocab_size) if kind == 4 else draw.choice(FAR))
        return found


API_SHARE = 10
"""Every so many sequences are also sent through a chat stream."""
FAR = (2**31, 10**9, -1)
"""Ids that no vocabulary has, as only a broken engine could send them."""


class Checker:
    """Reads sequences in several ways and compares."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._draw = random.Random(seed)
        self.recoveries: Counter[str] = Counter()
        """How often each kind of leniency was met: a fuzzer that never meets one tests nothing."""
        self.num_checked = 0

    def check(self, tokens: Sequence[int]) -> None:
        """Fail with the sequence where something does not hold."""
        try:
            self._check(tokens)
        except Exception as error:
            text = decode(self._tokenizer, tokens)
            raise AssertionError(f"{error!r} for {list(tokens)}, which is {text!r}") from error
        if self.num_checked % API_SHARE == 0:
            self._check_api(tokens)
        self.num_checked += 1

    def _check(self, tokens: Sequence[int]) -> None:
        reason = self._draw.choice(REASONS)
        streamed, deltas = self._read(tokens, reason, range(len(tokens) + 1))
        cuts = sorted({0, len(tokens), *self._draw.choices(range(len(tokens) + 1), k=2)})
        whole, _ = self._read(tokens, reason, cuts)
        assert whole == streamed, f"the cut {cuts} changes the answer: {whole} {streamed}"
        short, short_deltas = self._read_short(tokens, reason)
        assert short == streamed, f"the short way changes the answer: {short} {streamed}"
        assert _merged(short_deltas) == _merged(deltas)
        _check_streams(streamed, deltas)
        parser = HarmonyParser(self._tokenizer)
        events = parser.push(tokens) + parser.finish()
        self.recoveries.update(parser.recoveries)
        self._check_texts(tokens, parser.messages)
        # What chat shows, in the order of writing, is the text of the messages without control tokens.
        shown = "".join(d.text for d in deltas if d.kind != "tool_call")
        written = "".join(event.text for event in events if event.kind == "text")
        ignored = dict.fromkeys(map(ord, SEPARATOR))
        assert shown.translate(ignored) == written.translate(ignored), f"{shown!r} {written!r}"

    def _check_api(self, tokens: Sequence[int]) -> None:
        """Compare a chat stream of an event per token with the whole answer of one event."""
        options = {
            "stop_strings": self._draw.choice(((), (), ("zq1", "a"), ("}",))),
            "max_calls": self._draw.choice((None, None, 1)),
            "calls_as_text": self._draw.random() < 0.2,
        }
        reason = self._draw.choice(REASONS)
        cuts = [[token] for token in tokens]
        streamed = _fold_stream(b"".join(self._answer(cuts, reason, options)[0]))
        whole = json.loads(encode(self._answer([tokens], reason, options)[1].completion()))
        choice = whole["choices"][0]
        message = choice["message"]
        for call in message.get("tool_calls", ()):
            call.pop("id")
        expected = {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning", ""),
            "tool_calls": message.get("tool_calls", []),
            "finish_reason": choice["finish_reason"],
        }
        assert streamed == expected, (
            f"{streamed} {expected} for {list(tokens)}, {options}, {reason}"
        )

    def _answer(self, cuts: Sequence[Sequence[int]], reason: str, options):
        choice = ChoiceRun(0, HarmonyDecoder(self._tokenizer, DECLARED), **options)
        job = Job(
            endpoint="chat",
            answer_id="a",
            model="m",
            created=0,
            num_prompt_tokens=1,
            requests=[],
            runs=[choice],
            is_stream=True,
            with_usage=False,
        )
        writer, whole_writer, fold, sent = ChatWriter(job), ChatWriter(job), ChatFold(job), []
        left = deque(cuts)
        while choice.finish_reason is None:
            texts = self._take_short(choice, left)
            for text in texts:  # as `ChunkSource` does it
                sent.append(encode(text).join(writer.template(0, *choice.decoder.continues)))
                kind, index = choice.decoder.continues
                deltas = [Delta(kind=kind, index=index, text=text)]
                chunks = whole_writer.chunks(Piece(index=0, deltas=deltas))
                fold.add(chunks)
                assert sent[-1] == sse_lines(chunks), "a template is what encoding gives"
            if texts:
                continue
            if left:
                deltas = choice.take(TokensEvent(request_id="", token_ids=left.popleft()))
            else:
                deltas = choice.finish(reason)
            piece = Piece(index=0, deltas=deltas, finish_reason=choice.finish_reason)
            fold.add(whole_writer.chunks(piece))
            sent.append(writer.lines(piece))
        return sent, fold

    def _take_short(self, choice: ChoiceRun, left: deque[list[int]]) -> list[str]:
        """Take tokens that came one by one the short way, several at once."""
        if choice.plain is None:
            return []
        most = self._draw.randint(1, 9)
        stretch = itertools.takewhile(lambda cut: len(cut) == 1, itertools.islice(left, most))
        texts = choice.plain([cut[0] for cut in stretch])
        choice.num_output_tokens += len(texts)
        for _ in texts:
            left.popleft()
        return texts

    def _read(self, tokens: Sequence[int], reason: str, cuts: Sequence[int]):
        decoder = HarmonyDecoder(self._tokenizer, DECLARED)
        deltas = []
        for place, end in itertools.pairwise(cuts):
            deltas += decoder.push(tokens[place:end])
        deltas += decoder.finish(reason)
        return decoder.answer(), deltas

    def _read_short(self, tokens: Sequence[int], reason: str):
        decoder = HarmonyDecoder(self._tokenizer, DECLARED)
        deltas, place = [], 0
        while place < len(tokens):
            texts = decoder.plain(tokens[place : place + self._draw.randint(1, 9)])
            if texts:
                kind, index = decoder.continues
                deltas += [Delta(kind=kind, index=index, text=text) for text in texts]
            else:
                deltas += decoder.push([tokens[place]])
            place += len(texts) or 1
        deltas += decoder.finish(reason)
        return decoder.answer(), deltas

    def _check_texts(self, tokens: Sequence[int], messages) -> None:
        """Text after `<|message|>` is content, whole and in order; every marker is in content or header."""
        contents = "\x01".join(message.text for message in messages)
        place, seen = 0, set()
        for is_content, text in self._runs(tokens):
            seen.update(MARKER.findall(text))
            if is_content and text:
                place = contents.find(text, place)
                assert place >= 0, f"{text!r} is not in {contents!r}, or out of order"
                place += len(text)
        headers = [message.header for message in messages]
        fields = [(h.role, h.name, h.recipient, h.channel, h.content_type) for h in headers]
        lost = seen - set(MARKER.findall(f"{contents} {fields}"))
        assert not lost, f"{lost} of {seen} lost: {contents!r} {fields}"

    def _runs(self, tokens: Sequence[int]) -> Iterator[tuple[bool, str]]:
        """Yield the texts between control tokens, and whether they can only be content."""
        message, run, is_content = self._tokenizer.control_id("<|message|>"), [], False
        for token in (*tokens, message):
            if self._tokenizer.control_name(token) is None:
                run.append(token)
                continue
            yield is_content, decode(self._tokenizer, run)
            run, is_content = [], token == message


def _fold_stream(raw: bytes) -> dict:
    """Read a chat stream as a client does."""
    found = {"content": "", "reasoning": "", "tool_calls": [], "finish_reason": None}
    for block in filter(None, raw.split(b"\n\n")):
        choice = json.loads(block.removeprefix(b"data: "))["choices"][0]
        assert found["finish_reason"] is None, "a chunk after the last"
        found["finish_reason"] = choice["finish_reason"]
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name in ("content", "reasoning"):
            found[name] += delta.get(name, "")
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(found["tool_calls"]):
                assert piece["id"]
                found["tool_calls"].append({"type": piece["type"], "function": piece["function"]})
            else:
                function = found["tool_calls"][piece["index"]]["function"]
                function["arguments"] += piece["function"]["arguments"]
    return found


def _merged(deltas) -> list:
    """Join what continues the delta before."""
    found = []
    for delta in deltas:
        key = (delta.kind, delta.index, delta.name)
        if found and found[-1][0] == key and delta.kind != "tool_call":
            found[-1][1] += delta.text
        else:
            found.append([key, delta.text])
    return found


def _check_streams(answer, deltas) -> None:
    streams: dict[tuple[str, int], str] = {}
    calls = []
    for delta in deltas:
        if delta.kind == "tool_call":
            assert delta.index == len(calls)
            calls.append(delta.name)
        else:
            key = (delta.kind, delta.index)
            streams[key] = streams.get(key, "") + delta.text
    assert calls == [call["name"] for call in answer.tool_calls]
    assert streams.pop(("content", 0), "") == (answer.content or "")
    assert streams.pop(("reasoning", 0), "") == (answer.reasoning or "")
    for i, call in enumerate(answer.tool_calls):
        assert streams.pop(("tool_arguments", i), "") == call["arguments"]
    assert not streams


def run(tokenizer: Tokenizer, *, seed: int, count: int) -> Checker:
    """Check `count` sequences of a seed; the first that breaks a promise raises AssertionError with its tokens."""
    checker = Checker(tokenizer, seed)
    sequences = Generator(tokenizer, seed).sequences()
    while checker.num_checked < count:
        checker.check(next(sequences))
    return checker
