"""`rose chat` shows answers as they come and plays the person's part in a tool loop."""

from __future__ import annotations

import json

import click
import httpx
import pytest
from click.testing import CliRunner

from rose.cli.chat import Conversation, ServerError, _read_tools
from rose.cli.chat import chat as chat_command
from rose.cli.options import api_key_option
from rose.frontend.formatters.harmony.conversation import EFFORTS

OPTIONS = {
    "no_reasoning": False,
    "effort": "low",
    "temperature": None,
    "max_tokens": 5,
    "seed": None,
}


def _sse(*deltas, finish="stop"):
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _call(index, name, *arguments):
    first = {
        "index": index,
        "id": f"c{index}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
    rest = [{"index": index, "function": {"arguments": text}} for text in arguments]
    return [{"tool_calls": [piece]} for piece in (first, *rest)]


@pytest.fixture
def talk():
    """Return a function that makes a conversation with a server of canned answers, and its requests."""

    def talk(*answers, options=OPTIONS, status=200, num_busy=0):
        sent = []
        left = list(answers)
        busy = [
            httpx.Response(
                503, headers={"retry-after": "0"}, json={"error": {"message": "it is loading"}}
            )
        ] * num_busy

        def handle(request):
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m"}]})
            sent.append(json.loads(request.content))
            if busy:
                return busy.pop()
            return httpx.Response(status, text=left.pop(0))

        http = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://rose")
        return Conversation(http, model=None, tools=None, options=options), sent

    return talk


def test_pieces_are_shown_and_remembered(talk, capsys):
    answer = _sse(
        {"role": "assistant", "content": ""},
        {"reasoning": "hm"},
        {"content": "Hel"},
        {"content": "lo"},
    )
    conversation, sent = talk(answer, answer)
    reply = conversation.ask({"role": "user", "content": "Hi"})
    assert reply == {"role": "assistant", "content": "Hello", "reasoning": "hm"}
    assert "hm" in capsys.readouterr().out
    conversation.ask({"role": "user", "content": "again"})
    assert [m["role"] for m in sent[1]["messages"]] == ["user", "assistant", "user"]
    assert sent[0]["model"] == "m"
    assert (sent[0]["reasoning_effort"], sent[0]["max_completion_tokens"]) == ("low", 5)
    assert "temperature" not in sent[0]


def test_reasoning_can_be_hidden(talk, capsys):
    conversation, _ = talk(
        _sse({"reasoning": "secret"}, {"content": "x"}), options={**OPTIONS, "no_reasoning": True}
    )
    conversation.ask({"role": "user", "content": "Hi"})
    assert "secret" not in capsys.readouterr().out


def test_calls_are_shown_and_their_results_sent(talk, capsys, monkeypatch):
    calling = _sse(*_call(0, "f", '{"a":', "1}"), *_call(1, "g", "{}"), finish="tool_calls")
    conversation, sent = talk(calling, _sse({"content": "done"}))
    reply = conversation.ask({"role": "user", "content": "Hi"})
    assert 'f {"a":1}' in capsys.readouterr().out
    monkeypatch.setattr("click.prompt", lambda text, default="": f"answer to {text}")
    last = conversation.answer_calls(reply["tool_calls"])
    assert last["content"] == "done"
    results = sent[1]["messages"][-2:]
    assert [r["tool_call_id"] for r in results] == ["c0", "c1"]
    assert results[0]["content"] == "answer to result of f"


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ('{"error": {"message": "queue full"}}', 429, "queue full (status 429)"),
        ("<html>", 502, "the server answered with status 502"),
        (
            'data: {"error": {"message": "device lost"}}\n\ndata: [DONE]\n\n',
            200,
            "cut off: device lost",
        ),
    ],
)
def test_what_went_wrong_is_said(talk, body, status, part):
    conversation, _ = talk(body, status=status)
    with pytest.raises(ServerError) as caught:
        conversation.ask({"role": "user", "content": "Hi"})
    assert part in str(caught.value)


def test_tools_come_from_a_json_list(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text('[{"type": "function"}]')
    assert _read_tools(path) == [{"type": "function"}]
    for wrong in ("{", "{}"):
        path.write_text(wrong)
        with pytest.raises(ServerError):
            _read_tools(path)


def test_a_server_that_cannot_take_it_now_is_asked_again(talk, capsys):
    conversation, sent = talk(_sse({"content": "4"}), num_busy=3)
    assert conversation.ask({"role": "user", "content": "2+2?"})["content"] == "4"
    assert len(sent) == 4
    assert capsys.readouterr().err.count("it is loading (status 503); asking again") == 3


def test_asking_again_has_an_end(talk):
    conversation, sent = talk(num_busy=9)
    with pytest.raises(ServerError, match="it is loading"):
        conversation.ask({"role": "user", "content": "2+2?"})
    assert len(sent) == 4


@pytest.mark.parametrize(
    ("words", "variable", "key"),
    [
        ([], "one, two", "one"),  # a server takes several from the same variable
        ([], "one", "one"),
        ([], " ", ""),
        (["--api-key", "o,ne"], "two", "o,ne"),
    ],
)
def test_a_key_comes_from_the_option_or_is_the_first_of_the_variable(words, variable, key):
    @click.command()
    @api_key_option
    def show(api_key):
        click.echo(api_key or "")

    shown = CliRunner().invoke(show, words, env={"ROSE_API_KEY": variable})
    assert shown.output == f"{key}\n"


def test_help_tells_every_effort_that_a_server_takes():
    help_text = CliRunner().invoke(chat_command, ["--help"]).output
    assert all(effort in help_text for effort in EFFORTS)
