"""Log-probabilities in answers: those of the content's tokens, streamed and whole alike; sampling fields."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.frontend.formatters.registry import build_formatter
from rose.protocol.sampling_params import SamplingParams

FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANSWERS = {
    "plain": ("<|channel|>final<|message|>The sum is 4.<|return|>", "The sum is 4."),
    "after reasoning": (
        f"<|channel|>analysis<|message|>Easy sum.<|end|>{FINAL}It is 4.<|return|>",
        "It is 4.",
    ),
    "characters of several tokens": (
        "<|channel|>final<|message|>𓀀 and 🧑‍🚀 and \u0f3a<|return|>",
        "𓀀 and 🧑‍🚀 and \u0f3a",
    ),
    "cut by the limit": ("<|channel|>final<|message|>one two", "one two"),
    "control token in content": (
        "<|channel|>final<|message|>a <|start|> b c<|return|>",
        "a  b c",
    ),
    "no content": ("<|channel|>analysis<|message|>Hm.<|return|>", ""),
}


@pytest.fixture(scope="module")
def harmony(o200k):
    return build_formatter("harmony", o200k)


@pytest.fixture
def ask(lab, harmony, o200k):
    """Return a function that asks for an answer with log-probabilities, streamed and not."""

    def ask(text, tokens_per_event=1, **body):
        tokens = o200k.encode_with_control(text)
        line = lab.line(tokens, tokens_per_event=tokens_per_event)

        async def scenario():
            async with lab.serving(line, formatter=harmony) as server:
                whole = await server.chat(logprobs=True, **body)
                stream = await server.chat(logprobs=True, stream=True, **body)
                assert whole.status_code == stream.status_code == 200
                return whole.json(), lab.sse(stream)[:-1]

        return lab.run(scenario)

    return ask


def _streamed(chunks):
    entries, text = [], ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            entries += (choice["logprobs"] or {"content": []})["content"]
            if not choice["delta"].get("content"):
                assert "reasoning" not in choice["delta"] or choice["logprobs"] is None
    return text, entries


def _bytes(entries):
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize("name", ANSWERS)
def test_bytes_of_the_tokens_make_the_content(ask, name, tokens_per_event):
    text, content = ANSWERS[name]
    whole, chunks = ask(text, tokens_per_event, top_logprobs=2)
    [choice] = whole["choices"]
    entries = choice["logprobs"]["content"]
    assert _bytes(entries) == content == (choice["message"]["content"] or "")
    assert _streamed(chunks) == (content, entries)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_two_messages_are_parted_by_text_of_no_token(ask):
    text = f"<|channel|>commentary<|message|>Let me see.<|end|>{FINAL}It is 4.<|return|>"
    whole, chunks = ask(text)
    [choice] = whole["choices"]
    assert choice["message"]["content"] == "Let me see.\n\nIt is 4."
    assert _bytes(choice["logprobs"]["content"]) == "Let me see.It is 4."
    assert _streamed(chunks)[1] == choice["logprobs"]["content"]


@pytest.mark.parametrize(
    ("stop", "content", "scored"),
    [
        (" is", "The sum", "The sum"),
        ("m i", "The su", "The sum"),  # cuts a token, which is sent whole
        ("nothing of it", "The sum is 4.", "The sum is 4."),
        ("4. and more", "The sum is 4.", "The sum is 4."),
        ("The", "", ""),
    ],
)
@pytest.mark.parametrize("tokens_per_event", [1, 100])
def test_tokens_after_a_stop_string_are_not_sent(ask, stop, content, scored, tokens_per_event):
    text = "<|channel|>final<|message|>The sum is 4.<|return|>"
    whole, chunks = ask(text, tokens_per_event, stop=[stop])
    [choice] = whole["choices"]
    assert (choice["message"]["content"] or "") == content
    assert _bytes(choice["logprobs"]["content"]) == scored
    assert _streamed(chunks) == (content, choice["logprobs"]["content"])


def test_a_forbidden_call_shown_as_text_has_none_and_shifts_nothing(ask):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    text = (
        "<|channel|>commentary to=functions.f<|message|>{}<|end|>"
        f"{FINAL}It is 4, not 5.<|return|>"
    )
    whole, chunks = ask(text, tools=[tool], tool_choice="none", stop=[", not"])
    [choice] = whole["choices"]
    assert choice["message"]["content"].endswith("It is 4")
    assert _bytes(choice["logprobs"]["content"]) == "It is 4"
    assert _streamed(chunks)[1] == choice["logprobs"]["content"]


pieces = st.sampled_from(
    [
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "final",
        "analysis",
        "assistant",
        " a",
        "é",
        "<|constrain|>",
        "<|return|>",
        "commentary",
        " to=functions.f",
        "\n",
        "🧑‍🚀",
        FINAL,
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, max_size=14))
def test_spans_of_any_answer_lie_in_its_content_in_order(harmony, o200k, parts):
    tokens = o200k.encode_with_control("<|channel|>final<|message|>" + "".join(parts))
    decoder = harmony.decoder()
    spans = decoder.track()
    plain = harmony.decoder()
    deltas = [d for t in tokens for d in decoder.push([t])] + decoder.finish("stop")
    assert _joined(deltas) == _joined(plain.push(tokens) + plain.finish("stop"))
    content = decoder.answer().content or ""
    end = ordinal = -1
    for span in spans:
        assert ordinal < span.ordinal < len(tokens)
        assert max(end, 0) <= span.start <= span.end <= len(content)
        text = o200k.token_bytes(tokens[span.ordinal]).decode("utf-8", "ignore")
        assert text in content[span.start : span.end]
        ordinal, end = span.ordinal, span.end


def _joined(deltas):
    streams = {}
    for delta in deltas:
        key = (delta.kind, delta.index)
        streams[key] = streams.get(key, "") + delta.text
    return streams


@pytest.mark.parametrize("logprobs", [0, 2])
def test_completions_have_their_own_form(lab, o200k, logprobs):
    plain = build_formatter("plain", o200k)
    line = lab.line(o200k.encode_with_control("Once upon 🧑‍🚀 time<|return|>"), tokens_per_event=2)

    async def scenario():
        async with lab.serving(line, formatter=plain) as server:
            whole = (await server.complete(logprobs=logprobs, n=2)).json()["choices"]
            stream = await server.complete(logprobs=logprobs, stream=True)
            return whole, lab.sse(stream)[:-1]

    whole, chunks = lab.run(scenario)
    for choice in whole:
        found = choice["logprobs"]
        count = len(found["tokens"])
        assert found["tokens"][:2] == ["Once", " upon"]
        assert found["text_offset"][:3] == [0, 4, 9]
        assert found["text_offset"] == sorted(found["text_offset"])
        assert found["token_logprobs"] == [0.0] * count
        assert choice["text"] == "Once upon 🧑‍🚀 time"
        if logprobs == 0:
            assert found["top_logprobs"] is None
        else:
            assert [len(top) for top in found["top_logprobs"]] == [2] * count
            assert found["top_logprobs"][0]["Once"] == 0.0
    for name in ("tokens", "token_logprobs", "text_offset"):
        parts = [c["logprobs"][name] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        assert [value for part in parts for value in part] == whole[0]["logprobs"][name]


def test_nothing_is_sent_unless_asked_for(lab):
    async def scenario():
        async with lab.serving(lab.line([*lab.content("Hi"), lab.END])) as server:
            [choice] = (await server.chat(logprobs=False, top_logprobs=0)).json()["choices"]
            assert choice["logprobs"] is None
            [choice] = (await server.complete()).json()["choices"]
            assert choice["logprobs"] is None
            assert [r.sampling.logprobs for r in server.engine.requests] == [None, None]

    lab.run(scenario)


def test_sampling_fields_reach_the_engine(lab):
    fields = {
        "repetition_penalty": 1.5,
        "frequency_penalty": -0.5,
        "presence_penalty": 2,
        "min_tokens": 3,
        "seed": 7,
    }

    async def scenario():
        async with lab.serving(lab.line([*lab.content("Hi"), lab.END])) as server:
            await server.chat(
                **fields, logit_bias={"17": -100, "4": 2.5}, logprobs=True, top_logprobs=4, n=2
            )
            await server.complete(**fields, logprobs=0, ignore_eos=True)
            return server.engine.requests

    first, second, third = lab.run(scenario)
    expected = SamplingParams(**fields, logit_bias={17: -100.0, 4: 2.5}, logprobs=4)
    assert first.sampling == expected
    assert second.sampling.seed == 8
    assert third.sampling == SamplingParams(**fields, logprobs=0)
    assert first.stop_token_ids == [lab.END]
    assert third.stop_token_ids == []


@pytest.mark.parametrize("wrong", [True, -1, 21, "2"])
def test_wrong_logprobs_of_completions_are_refused(lab, wrong):
    async def scenario():
        async with lab.serving() as server:
            response = await server.complete(logprobs=wrong)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "logprobs"

    lab.run(scenario)
