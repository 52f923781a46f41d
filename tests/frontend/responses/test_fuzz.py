"""Token sequences from well-formed to absurd as responses: a stream equals the whole, nothing is lost or made up."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from fakes import harmony_fuzz
from rose.frontend.formatters.harmony.answer import HarmonyDecoder
from rose.frontend.generation import ChoiceRun, Job, Piece
from rose.frontend.responses.events import sse
from rose.frontend.responses.maker import _body
from rose.frontend.responses.schemas import ResponsesRequest
from rose.frontend.responses.writer import ResponseWriter
from rose.frontend.schemas import encode
from rose.protocol.event import TokensEvent


def answer(o200k, cuts, reason, *, mode, options, with_summary):
    """Return the bytes of the stream and the body at its end; `cuts` has the tokens of each event."""
    decoder = HarmonyDecoder(o200k, harmony_fuzz.DECLARED)
    run = ChoiceRun(0, decoder, is_separate=True, reasoning=mode, **options)
    job = Job(
        endpoint="responses",
        answer_id="resp_" + "0" * 32,
        model="m",
        created=0,
        num_prompt_tokens=1,
        requests=[],
        runs=[run],
        is_stream=True,
    )
    body = _body(ResponsesRequest(model="m", input="Hi"), job, is_stored=False)
    writer = ResponseWriter(job, body, with_summary=with_summary, is_hidden=mode == "hidden")
    sent = [b"".join(map(sse, [*writer.created(), *writer.begun()]))]
    for cut in (*cuts, None):
        if run.finish_reason is not None:
            break
        event = TokensEvent(request_id="", token_ids=cut or [])
        texts = run.plain(cut) if run.plain is not None and len(cut or ()) == 1 else []
        if texts:  # as `stream.JobSource` does it
            run.num_output_tokens += 1
            sent += writer.plain(texts)
            continue
        deltas = run.finish(reason) if cut is None else run.take(event)
        events = writer.events(Piece(index=0, deltas=deltas, finish_reason=run.finish_reason))
        sent.append(b"".join(map(sse, events)))
    sent.append(b"".join(map(sse, [*writer.end(), *writer.last()])))
    return b"".join(sent), json.loads(encode(writer.body)), decoder.answer()


def timeless(body):
    """Return a body without ids of calls, times, and usage: one event has more tokens than a stop string leaves."""
    body = {k: v for k, v in body.items() if k not in ("completed_at", "usage")}
    output = [{k: v for k, v in item.items() if k != "call_id"} for item in body["output"]]
    return body | {"output": output}


def check(o200k, draw, tokens):
    options = {
        "stop_strings": draw.choice(((), (), ("zq1", "a"))),
        "max_calls": draw.choice((None, None, 1)),
        "calls_as_text": draw.random() < 0.2,
    }
    shown = {
        "mode": draw.choice(("visible", "visible", "hidden")),
        "with_summary": draw.random() < 0.2,
    }
    reason = draw.choice(("stop", "length"))
    stream, last, _ = answer(o200k, [[t] for t in tokens], reason, options=options, **shown)
    _, whole, found = answer(o200k, [tokens], reason, options=options, **shown)
    assert timeless(last) == timeless(whole)
    events = [json.loads(block.split("\ndata: ")[1]) for block in _blocks(stream)]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[-1]["response"] == last
    _check_deltas(events, last["output"])
    if options == {"stop_strings": (), "max_calls": None, "calls_as_text": False}:
        _check_texts(last["output"], found, is_hidden=shown["mode"] == "hidden")


def _blocks(stream):
    return [block for block in stream.decode().split("\n\n") if block]


def _check_deltas(events, output):
    """What a client that reads deltas only has at the end is the output."""
    texts = ["" for _ in output]
    for event in events:
        if event["type"].endswith(("output_text.delta", "reasoning_text.delta", "arguments.delta")):
            texts[event["output_index"]] += event["delta"]
            assert event["item_id"] == output[event["output_index"]]["id"]
    for text, item in zip(texts, output, strict=True):
        if item["type"] == "function_call":
            assert text == item["arguments"]
        else:
            assert text == "".join(part["text"] for part in item["content"])


def _check_texts(output, found, *, is_hidden):
    """Items have the text that chat would show, message by message."""
    said = [p["text"] for i in output if i["type"] == "message" for p in i["content"]]
    thought = [p["text"] for i in output if i["type"] == "reasoning" for p in i["content"]]
    called = [
        {"name": i["name"], "arguments": i["arguments"]}
        for i in output
        if i["type"] == "function_call"
    ]
    assert "".join(said) == (found.content or "")
    assert "".join(thought) == ("" if is_hidden else found.reasoning or "")
    assert called == found.tool_calls


@pytest.mark.parametrize("seed", range(2))
def test_1000_sequences_a_seed(o200k, seed):
    draw = random.Random(seed)
    for tokens in itertools.islice(harmony_fuzz.Generator(o200k, seed).sequences(), 1000):
        check(o200k, draw, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_100_000_sequences(o200k, seed):
    draw = random.Random(seed)
    for tokens in itertools.islice(harmony_fuzz.Generator(o200k, seed).sequences(), 10_000):
        check(o200k, draw, tokens)


def test_most_tokens_take_the_short_way(talk, line, monkeypatch):
    from rose.frontend.stream import AnswerResponse

    sent, right = [], AnswerResponse._send_now

    def send_now(self, parts):
        sent.extend(parts)
        return right(self, parts)

    async def scenario(room):
        monkeypatch.setattr(AnswerResponse, "_send_now", send_now)
        shortened = []
        plain = ResponseWriter.plain
        monkeypatch.setattr(
            ResponseWriter, "plain", lambda *given: shortened.append(given) or plain(*given)
        )
        events = await room.create(stream=True)
        text = "".join(e["delta"] for e in events if e["type"].endswith("output_text.delta"))
        assert text == " word" * 50
        assert len(sent) > 40
        assert len(shortened) > 40

    talk(scenario, line("<|channel|>final<|message|>" + " word" * 50, delay_ms=1))
