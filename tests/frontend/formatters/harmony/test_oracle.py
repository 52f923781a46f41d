"""Renderer and parser against openai-harmony 0.0.8, and the parser on text without headers."""

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


def _read(formatter, token_ids):
    decoder = formatter.decoder()
    for token_id in token_ids:
        decoder.push([token_id])
    decoder.finish("stop")
    return decoder.answer()


def test_plain_text_without_any_header_is_the_answer(formatter, o200k):
    draw = random.Random(12)
    for size in (1, 5, HEADER_TOKENS - 1, HEADER_TOKENS, HEADER_TOKENS + 1, 900):
        text = "Plain " + "".join(draw.choices("ab 𠮷é\n", k=size))
        answer = _read(formatter, o200k.encode(text))
        assert answer.content == text


def test_long_text_without_header_streams_before_its_end(formatter, o200k):
    decoder = formatter.decoder()
    deltas = decoder.push(o200k.encode("word " * (HEADER_TOKENS + 50)))
    assert sum(len(delta.text) for delta in deltas) > 4 * HEADER_TOKENS


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
    answer = _read(HarmonyFormatter(tokenizer), tokenizer.encode_with_control(text))
    assert (answer.reasoning, answer.content) == ("é?", "Oslo")
