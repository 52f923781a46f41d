"""Our twin of the gpt-oss project's compatibility suite: 30 questions, 6 tools, both APIs, streamed and not.

What must hold for each question: its tool is called, with arguments that satisfy the tool's schema and are those the
model wrote; the reasoning comes in the field its API has for it, streamed as deltas; the loop ends with the answer.
"""

from __future__ import annotations

import json

import jsonschema
import pytest

from fakes import compatibility as twin
from fakes import openai_schemas
from rose.frontend.o200k import O200kTokenizer

CHECKED = range(0, 30, 5)
"""Questions whose chunks and events are held against OpenAI's schemas: one per tool."""
MAX_TURNS = 10


@pytest.fixture(scope="module")
def client(scripted):
    openai = pytest.importorskip("openai", reason="the openai client library is not installed")
    with (
        scripted(twin.script(O200kTokenizer(), twin.CASES)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


class Run:
    """What was seen of one question."""

    def __init__(self, number: int):
        self.name, self.question, self.arguments = twin.CASES[number]
        self.number = number
        self.calls: list[tuple[str, str]] = []
        self.reasoning = self.streamed_reasoning = ""
        self.answer = ""

    def check(self, *, is_stream: bool) -> None:
        [(name, arguments)] = self.calls
        assert name == self.name
        jsonschema.validate(json.loads(arguments), twin.TOOLS[name][0])
        assert json.loads(arguments) == self.arguments
        assert self.reasoning == twin.THOUGHT
        assert self.streamed_reasoning == (twin.THOUGHT if is_stream else "")
        assert self.answer == twin.answer_to(self.number)

    def hold_against(self, root: str, objects) -> None:
        if self.number in CHECKED:
            for each in objects:
                sent = each.model_dump(mode="json", exclude_unset=True)
                place = f"{root}/{sent['type']}" if root == "response.stream_event" else root
                assert openai_schemas.problems(place, sent) == [], sent


def _chat(client, run: Run, *, is_stream: bool) -> None:
    messages = [{"role": "user", "content": run.question}]
    tools = [twin.tool(name, is_nested=True) for name in twin.TOOLS]
    for _ in range(MAX_TURNS):
        message = (_chat_stream if is_stream else _chat_whole)(client, run, messages, tools)
        run.reasoning += message.get("reasoning") or ""
        messages.append(message)
        if not message.get("tool_calls"):
            run.answer = message["content"]
            return
        for call in message["tool_calls"]:
            run.calls.append((call["function"]["name"], call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": twin.RESULT})


def _chat_whole(client, run, messages, tools) -> dict:
    whole = client.chat.completions.create(model="m", messages=messages, tools=tools)
    run.hold_against("chat.completion", [whole])
    return whole.choices[0].message.model_dump(exclude_unset=True)


def _chat_stream(client, run, messages, tools) -> dict:
    with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion()
    run.hold_against("chat.completion.chunk", chunks)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    run.streamed_reasoning += "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    # With what the helper adds (parsed, parsed_arguments, index): that is how its users send it back.
    return final.choices[0].message.model_dump(exclude_unset=True)


def _responses(client, run: Run, *, is_stream: bool) -> None:
    tools = [twin.tool(name, is_nested=False) for name in twin.TOOLS]
    given = {"input": run.question, "tools": tools, "model": "m"}
    for _ in range(MAX_TURNS):
        response = (_response_stream if is_stream else _response_whole)(client, run, given)
        results = []
        for item in response.output:
            if item.type == "reasoning":
                assert [part.type for part in item.content] == ["reasoning_text"]
                run.reasoning += item.content[0].text
            elif item.type == "function_call":
                run.calls.append((item.name, item.arguments))
                results.append(
                    {
                        "type": "function_call_output",
                        "call_id": item.call_id,
                        "output": twin.RESULT,
                    }
                )
        if not results:
            run.answer = response.output_text
            return
        given |= {"previous_response_id": response.id, "input": results}


def _response_whole(client, run, given):
    response = client.responses.create(**given)
    run.hold_against("response", [response])
    return response


def _response_stream(client, run, given):
    with client.responses.create(**given, stream=True) as stream:
        events = list(stream)
    run.hold_against("response.stream_event", events)
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    run.streamed_reasoning += text
    assert ("response.reasoning_text.done" in kinds) is bool(text)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    return events[-1].response


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [_chat, _responses], ids=["chat", "responses"])
def test_thirty_questions(client, ask, is_stream):
    passed = 0
    for number in range(len(twin.CASES)):
        run = Run(number)
        ask(client, run, is_stream=is_stream)
        run.check(is_stream=is_stream)
        passed += 1
    assert passed == 30  # a suite that drops failed runs would not notice
