"""Malformed answers read leniently, and the chat view: who sees which text."""

import pytest

from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.tokenizer import decode


@pytest.fixture(scope="module")
def formatter(o200k):
    return HarmonyFormatter(o200k)


@pytest.fixture
def read(formatter, o200k):
    def read(text, *, declared=("ping",), reason="stop"):
        decoder = formatter.decoder(declared_tools=declared)
        decoder.push(o200k.encode_with_control(text))
        decoder.finish(reason)
        return decoder.answer()

    return read


def call(arguments="{}", name="ping"):
    return [{"name": name, "arguments": arguments}]


CALLS = {
    "recipient twice": " to=functions.ping<|channel|>commentary to=functions.ping<|message|>{}<|call|>",
    "recipient glued to channel": "<|channel|>commentaryto=functions.ping<|message|>{}<|call|>",
    "recipient glued to role": "<|start|>assistantto=functions.ping<|channel|>commentary<|message|>{}<|call|>",
    "blank after to=": "<|channel|>commentary to= functions.ping<|message|>{}<|call|>",
    "channel junk": "<|channel|>commentary––commentary to=functions.ping<|message|>{}<|call|>",
    "invented type": "<|channel|>commentary to=functions.ping <|constrain|>response<|message|>{}<|call|>",
    "type glued to recipient": "<|channel|>commentary to=functions.ping<|constrain|>json<|message|>{}<|call|>",
    "second channel glued": "<|channel|>commentary to=functions.ping<|channel|>commentary<|message|>{}<|call|>",
    "call on final": "<|channel|>final to=functions.ping<|message|>{}<|call|>",
    "call on no channel": " to=functions.ping<|message|>{}<|call|>",
    "ended by end": "<|channel|>commentary to=functions.ping<|message|>{}<|end|>",
    "ended by nothing": "<|channel|>commentary to=functions.ping<|message|>{}",
    "bare name": "<|channel|>commentary to=ping <|constrain|>json<|message|>{}<|call|>",
    "bare name without to=": "<|channel|>commentary ping <|constrain|>json<|message|>{}<|call|>",
    "function as role": "<|start|>functions.ping<|channel|>commentary<|message|>{}<|call|>",
    "no message token": "<|channel|>commentary to=functions.ping <|constrain|>json{}<|call|>",
    "no message token, plain type": "<|channel|>commentary to=functions.ping json{}<|call|>",
    "no message token, no type": "<|channel|>commentary to=functions.ping{}<|call|>",
    "no message token, role section": " to=functions.ping<|channel|>commentary json {}<|call|>",
    "stop tokens in a row": "<|channel|>commentary to=functions.ping<|message|>{}<|call|><|return|><|end|>",
    "stray end of text": "<|channel|>commentary to=functions.ping<|message|>{}<|call|><|endoftext|>",
}


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS)
def test_a_call_is_recognised(read, text):
    answer = read(text)
    assert answer.tool_calls == call()
    assert (answer.content, answer.reasoning, answer.finish_reason) == (None, None, "tool_calls")


def test_a_call_that_skips_its_arguments_is_a_call_only_if_it_ends_as_one(read):
    header = "<|channel|>commentary to=functions.ping"
    assert read(header + "<|call|>").tool_calls == call("")
    for end in ("<|end|>", ""):
        assert read(header + end).tool_calls == []


NO_CALLS = {
    "a role": "<|channel|>commentary to=assistant<|message|>text<|end|>",
    "no name": "<|channel|>commentary to=functions.<|message|>text<|call|>",
    "not declared": "<|channel|>commentary to=pong<|message|>text<|call|>",
    "everyone": "<|channel|>final to=all<|message|>text<|end|>",
    "a word": "<|channel|>commentary 2?<|message|>text<|end|>",
}


@pytest.mark.parametrize("text", NO_CALLS.values(), ids=NO_CALLS)
def test_other_recipients_make_no_call_and_lose_no_text(read, text):
    answer = read(text)
    assert (answer.tool_calls, answer.content, answer.finish_reason) == ([], "text", "stop")


def test_an_undeclared_function_is_still_a_call_for_the_client_to_refuse(read):
    assert read("<|channel|>commentary to=functions.pong<|message|>{}<|call|>").tool_calls == call(
        name="pong"
    )


def test_builtin_calls_are_reasoning_unless_declared(read):
    text = "<|channel|>commentary to=python code<|message|>print(1)<|call|>"
    assert (read(text).reasoning, read(text).content) == ("print(1)", None)
    assert read(text, declared=["python"]).tool_calls == call("print(1)", "python")


def test_turns_of_others_that_the_model_made_up_are_not_its_answer(read):
    answer = read(
        "<|channel|>final<|message|>a<|end|><|start|>user<|message|>more?<|end|>"
        "<|start|>functions.ping to=assistant<|channel|>commentary<|message|>up<|end|>"
    )
    assert (answer.content, answer.reasoning) == ("a", "more?\n\nup")
    assert [(m.role, m.name) for m in answer.messages[1:]] == [
        ("user", None),
        ("tool", "functions.ping"),
    ]


INNER = {
    "no end, start": "<|channel|>analysis<|message|>t<|start|>assistant<|channel|>final<|message|>a<|return|>",
    "no end, no start": "<|channel|>analysis<|message|>t<|channel|>final<|message|>a<|return|>",
    "no start": "<|channel|>analysis<|message|>t<|end|><|channel|>final<|message|>a<|return|>",
    "no start, no marker": "<|channel|>analysis<|message|>t<|end|>final<|message|>a<|return|>",
    "no start token": "<|channel|>analysis<|message|>t<|end|>assistant<|channel|>final<|message|>a<|return|>",
    "start without role": "<|channel|>analysis<|message|>t<|end|><|start|><|channel|>final<|message|>a<|return|>",
    "channel as role": "<|channel|>analysis<|message|>t<|end|><|start|>final<|message|>a<|return|>",
    "role and channel glued": "<|channel|>analysis<|message|>t<|end|><|start|>assistantfinal<|message|>a<|return|>",
    "start twice": "<|start|>assistant<|channel|>analysis<|message|>t<|end|>"
    "<|start|>assistant<|start|>assistant<|channel|>final<|message|>a<|return|>",
    "no message token": "<|channel|>analysis t<|end|><|start|>assistant<|channel|>final a<|return|>",
    "other case": "<|channel|>Analysis<|message|>t<|end|><|start|>assistant<|channel|>Final<|message|>a<|return|>",
    "line feeds between": "<|channel|>analysis<|message|>t<|end|>\n<|start|>assistant<|channel|>final<|message|>a\n",
}


@pytest.mark.parametrize("text", INNER.values(), ids=INNER)
def test_broken_borders_do_not_mix_thought_and_answer(read, text):
    answer = read(text)
    assert (answer.reasoning, answer.content.strip()) == ("t", "a")
    assert answer.recoveries or "Analysis" in text


def test_a_well_formed_answer_has_no_recoveries(read):
    answer = read(
        "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>"
    )
    assert answer.recoveries == []


def test_names_of_control_tokens_stay_in_messages_and_out_of_chat(read):
    answer = read("<|channel|>final<|message|>a<|channel|>b<|start|>c<|endoftext|>d<|return|>")
    assert answer.messages[0].content == "a<|channel|>b<|start|>c<|endoftext|>d"
    assert answer.content == "abcd"


def test_text_that_looks_like_control_tokens_is_text(formatter, o200k):
    decoder = formatter.decoder()
    decoder.push(
        o200k.encode_with_control("<|channel|>final<|message|>") + o200k.encode("a<|end|>b")
    )
    assert decoder.answer().content == "a<|end|>b"


def test_messages_of_one_kind_are_kept_apart(read):
    answer = read(
        "<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    assert answer.content == "Plan.\n\nDone."


def test_content_is_null_only_where_no_message_for_the_user_was_begun(read):
    assert read("").content is None
    assert read("<|channel|>final<|message|><|return|>").content == ""
    assert read("<|channel|>analysis<|message|><|end|>").reasoning is None


@pytest.mark.parametrize(
    ("reason", "expected"), [("stop", "tool_calls"), ("length", "length"), ("abort", "tool_calls")]
)
def test_a_call_that_was_cut_is_not_finished(read, reason, expected):
    answer = read("<|channel|>commentary to=functions.ping<|message|>{", reason=reason)
    assert (answer.finish_reason, answer.tool_calls) == (expected, call("{"))


def test_a_cut_inside_a_header_gives_no_call(read):
    answer = read("<|channel|>commentary to=functions.pi", reason="length")
    assert (answer.tool_calls, answer.finish_reason) == ([], "length")


def test_tokens_of_reasoning_are_counted(read):
    text = "<|channel|>analysis<|message|>Easy sum.<|end|><|start|>assistant<|channel|>final<|message|>4.<|return|>"
    assert read(text).num_reasoning_tokens == 3


def test_parallel_calls_stream_under_their_own_index(formatter, o200k):
    one = "<|channel|>commentary to=functions.{}<|message|>{}<|call|>"
    text = one.format("a", "1") + "<|start|>assistant" + one.format("b", "2")
    deltas = formatter.decoder().push(o200k.encode_with_control(text))
    assert [(d.kind, d.index, d.name, d.text) for d in deltas] == [
        ("tool_call", 0, "a", ""),
        ("tool_arguments", 0, "", "1"),
        ("tool_call", 1, "b", ""),
        ("tool_arguments", 1, "", "2"),
    ]


def test_a_control_token_inside_a_message_holds_text_back_only_for_a_while(formatter, o200k):
    decoder = formatter.decoder()
    decoder.push(o200k.encode_with_control("<|channel|>final<|message|>a<|channel|>"))
    deltas = [d for i in o200k.encode(" word") * 70 for d in decoder.push([i])]
    assert "".join(d.text for d in deltas) == " word" * 70


def test_a_recipient_ends_where_spelled_out_markup_begins(formatter, o200k):
    decoder = formatter.decoder()
    decoder.push(o200k.encode_with_control("<|channel|>commentary"))
    decoder.push(o200k.encode(" to=functions.ping<|constrain|>json"))
    decoder.push(o200k.encode_with_control("<|message|>{}<|call|>"))
    assert decoder.answer().tool_calls == call()


TURN = (
    "<|channel|>analysis<|message|>Think.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
)


def test_messages_kept_apart_begin_with_an_item_and_have_no_blank_line_between(formatter, o200k):
    decoder = formatter.decoder(declared_tools=["f"])
    decoder.separate()
    deltas = decoder.push(o200k.encode_with_control(TURN))
    items = [(d.index, d.name) for d in deltas if d.kind == "item"]
    assert items == [(0, "reasoning"), (1, "commentary"), (2, "call")]
    assert [d.text for d in deltas if d.kind in ("reasoning", "content")] == [
        "Think.",
        "One moment.",
    ]
    messages = decoder.answer().messages
    repeated = "".join(
        f"<|start|>assistant{decode(o200k, message.token_ids)}" for message in messages
    )
    assert repeated == f"<|start|>assistant{TURN}"


@pytest.mark.parametrize(
    "text",
    [
        "no header at all<|end|>",
        "<|channel|>final<|message|>a<|return|><|return|>",
        "<|channel|>final<|message|>cut",
        "<|channel|>analysis<|message|>a<|end|><|start|>user<|message|>b<|end|>",
    ],
)
def test_what_is_not_well_formed_is_not_repeated_by_its_tokens(formatter, o200k, text):
    decoder = formatter.decoder()
    decoder.separate()
    decoder.push(o200k.encode_with_control(text))
    decoder.finish("stop")
    assert decoder.answer().messages[-1].token_ids is None


def test_a_final_message_is_repeated_with_the_end_that_prompts_have(formatter, o200k):
    decoder = formatter.decoder()
    decoder.separate()
    decoder.push(o200k.encode_with_control("<|channel|>final<|message|>Four.<|return|>"))
    [message] = decoder.answer().messages
    assert decode(o200k, message.token_ids) == "<|channel|>final<|message|>Four.<|end|>"
