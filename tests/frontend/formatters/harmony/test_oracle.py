"""Renderer and parser against openai-harmony 0.0.8, and the parser on sequences that no library takes."""

import itertools
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.formatters.harmony.header import read_header, salvage
from rose.frontend.formatters.harmony.parse import HEADER_TOKENS, parse
from rose.frontend.formatters.harmony.schema_types import type_text
from rose.frontend.tokenizer import decode, load_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported without packages
from bodies import Bodies, oracle_tokens

SPECIAL = [200002, 200003, 200005, 200006, 200007, 200008, 200012]
HEADER_WORDS = [173781, 35644, 12606, 815, 17196, 316, 28, 44580, 4108, 5701, 220, 1428, 1201, 289]


@pytest.fixture(scope="module")
def formatter(o200k):
    return HarmonyFormatter(o200k)


@pytest.mark.parametrize("seed", range(10))
def test_500_conversations_render_as_the_published_library_does(formatter, o200k, oracle, seed):
    bodies = Bodies(seed)
    for _ in range(50):
        body = bodies.body()
        ours, theirs = formatter.encode(body).token_ids, oracle_tokens(oracle, body)
        if ours != theirs:  # the texts say more than the ids
            assert decode(o200k, ours) == decode(o200k, theirs), body
        assert ours == theirs


def test_2000_schemas_are_typed_as_the_published_library_does(oracle):
    from openai_harmony import DeveloperContent, Message, Role, ToolDescription

    bodies = Bodies(99)
    for _ in range(200):
        schemas = [bodies.schema(0) for _ in range(10)]
        tools = [
            ToolDescription(name=f"f{i}", description="", parameters=s)
            for i, s in enumerate(schemas)
        ]
        content = DeveloperContent.new().with_function_tools(tools)
        text = oracle.decode(oracle.render(Message.from_role_and_content(Role.DEVELOPER, content)))
        for i, schema in enumerate(schemas):
            assert f"type f{i} = (_: {type_text(schema)}) => any;\n" in text, schema


def test_well_formed_answers_are_parsed_as_the_published_library_does(o200k, oracle):
    from openai_harmony import Role

    bodies = Bodies(5)
    for _ in range(400):
        token_ids = o200k.encode_with_control(_well_formed(bodies))
        theirs = oracle.parse_messages_from_completion_tokens(token_ids, Role.ASSISTANT)
        ours = parse(o200k, token_ids)
        assert [_seen(m.header, m.text) for m in ours] == [
            _seen(m, "".join(c.text for c in m.content)) for m in theirs
        ]


def _seen(header, text):
    return header.channel, header.recipient, header.content_type, text


def _well_formed(bodies):
    """An answer as text: some messages on any channel, calls with the recipient in either place."""
    messages = []
    for _ in range(bodies.draw.randint(1, 4)):
        text = bodies.text().replace(
            "<|", "< |"
        )  # names of control tokens would become tokens here
        if bodies.draw.random() < 0.5:
            channel = bodies.draw.choice(["analysis", "commentary", "final"])
            messages.append(f"<|channel|>{channel}<|message|>{text}")
            continue
        name = bodies.draw.choice(
            ["functions.get_weather", "functions.a-b", "python", "browser.search"]
        )
        channel = bodies.draw.choice(["analysis", "commentary"])
        kind = bodies.draw.choice(["", " <|constrain|>json", "<|constrain|>json", " json", " code"])
        early, late = bodies.draw.choice([(f" to={name}", ""), ("", f" to={name}")])
        messages.append(f"{early}<|channel|>{channel}{late}{kind}<|message|>{text}")
    ends = ["<|end|>", "<|call|>", "<|return|>", ""]
    return "<|end|><|start|>assistant".join(messages) + bodies.draw.choice(ends)


def _random_ids(draw):
    """Sequences from plausible to absurd: control tokens, header words, text, broken bytes, unknown ids."""
    pools = [SPECIAL, HEADER_WORDS, range(256), range(200002), [200013, 199999, 201088, 10**9]]
    weights = [draw.random() * w for w in (4, 4, 2, 3, 0.2)]
    size = draw.choice([3, 10, 30, 60, 400]) if draw.random() < 0.2 else draw.randint(0, 40)
    return [draw.choice(draw.choices(pools, weights)[0]) for _ in range(size)]


def _read(formatter, token_ids, cuts=None, declared=("ping",), reason="stop"):
    decoder = formatter.decoder(declared_tools=declared)
    places = [0, *(cuts if cuts is not None else range(1, len(token_ids))), len(token_ids)]
    deltas = [
        delta
        for begin, end in itertools.pairwise(places)
        for delta in decoder.push(token_ids[begin:end])
    ]
    deltas += decoder.finish(reason)
    return decoder.answer(), deltas


def _streams(deltas):
    """Concatenate deltas: text by stream, and the calls begun."""
    streams, calls = {}, []
    for delta in deltas:
        if delta.kind == "tool_call":
            assert delta.index == len(calls)
            calls.append(delta.name)
        else:
            key = (delta.kind, delta.index)
            streams[key] = streams.get(key, "") + delta.text
    return streams, calls


def _check_streams(answer, deltas):
    streams, calls = _streams(deltas)
    assert calls == [call["name"] for call in answer.tool_calls]
    assert streams.pop(("content", 0), "") == (answer.content or "")
    assert streams.pop(("reasoning", 0), "") == (answer.reasoning or "")
    for i, call in enumerate(answer.tool_calls):
        assert streams.pop(("tool_arguments", i), "") == call["arguments"]
    assert not streams


def _certain_texts(tokenizer, token_ids):
    """Runs of ordinary tokens that can only be content: between a message token and the next control token."""
    texts, run = [], None
    for token_id in [*token_ids, 200007]:
        if tokenizer.control_name(token_id) is None:
            if run is not None:
                run.append(token_id)
            continue
        if run:
            texts.append(decode(tokenizer, run))
        run = [] if token_id == 200008 else None
    return texts


def test_10000_random_sequences_neither_raise_nor_lose_text(formatter, o200k):
    draw = random.Random(11)
    for _ in range(10_000):
        token_ids = _random_ids(draw)
        answer, deltas = _read(formatter, token_ids)
        whole = "\x00".join(message.content for message in answer.messages)
        shown = "\x00".join(
            [answer.content or "", answer.reasoning or ""]
            + [call["arguments"] for call in answer.tool_calls]
        )
        place = 0
        for text in _certain_texts(o200k, token_ids):
            place = whole.find(text, place)
            assert place >= 0, (token_ids, text)
            place += len(text)
            assert text in shown, (token_ids, text)
        _check_streams(answer, deltas)
        assert all(message.content is not None for message in answer.messages)


def test_plain_text_without_any_header_is_the_answer(formatter, o200k):
    draw = random.Random(12)
    for size in (1, 5, HEADER_TOKENS - 1, HEADER_TOKENS, HEADER_TOKENS + 1, 900):
        text = "Plain " + "".join(draw.choices("ab 𠮷é\n", k=size))
        answer, _ = _read(formatter, o200k.encode(text))
        assert answer.content == text


def test_long_text_without_header_streams_before_its_end(formatter, o200k):
    decoder = formatter.decoder()
    deltas = decoder.push(o200k.encode("word " * (HEADER_TOKENS + 50)))
    assert sum(len(delta.text) for delta in deltas) > 4 * HEADER_TOKENS


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_the_cut_into_pushes_does_not_change_the_answer(formatter, seed, data):
    token_ids = _random_ids(random.Random(seed))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    reason = data.draw(st.sampled_from(["stop", "length", "abort"]))
    one_by_one, deltas = _read(formatter, token_ids, reason=reason)
    cut, cut_deltas = _read(formatter, token_ids, cuts=cuts, reason=reason)
    assert one_by_one == cut
    assert _streams(deltas) == _streams(cut_deltas)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80), st.booleans())
def test_headers_of_any_text_are_read(text, is_explicit):
    sections = [("role", text[:20]), ("channel", text[20:50]), ("constrain", text[50:])]
    for number in (1, 2, 3):
        read_header(sections[:number], is_explicit=is_explicit)
        salvage(sections[:number], is_explicit=is_explicit)


def test_the_parser_works_on_a_folders_own_vocabulary(small_folder):
    tokenizer = load_tokenizer(small_folder)
    text = "<|channel|>analysis<|message|>é?<|end|><|start|>assistant<|channel|>final<|message|>Oslo<|return|>"
    answer, _ = _read(HarmonyFormatter(tokenizer), tokenizer.encode_with_control(text))
    assert (answer.reasoning, answer.content) == ("é?", "Oslo")
