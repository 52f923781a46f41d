"""litellm against `rose serve --scripted`: its two adapters for servers like ours, streamed and not."""

from __future__ import annotations

import json

import pytest

from fakes import compatibility as twin
from rose.frontend.o200k import O200kTokenizer

NUMBER = 25


@pytest.fixture(scope="module")
def litellm(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network at import
    reason = "litellm is not installed (290 MB): pip install .[clients]"
    yield pytest.importorskip("litellm", reason=reason)
    patch.undo()


@pytest.fixture(scope="module")
def url(scripted):
    with scripted(twin.script(O200kTokenizer(), twin.CASES)) as server:
        yield f"{server.url}/v1"


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("adapter", ["openai", "hosted_vllm"])
def test_a_tool_loop(litellm, url, adapter, is_stream):
    name, question, arguments = twin.CASES[NUMBER]
    messages = [{"role": "user", "content": question}]
    given = {
        "model": f"{adapter}/m",
        "api_base": url,
        "api_key": "none",
        "tools": [twin.tool(name, is_nested=True)],
        "stream": is_stream,
    }

    def ask():
        answer = litellm.completion(messages=messages, **given)
        if is_stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        return answer.choices[0]

    first = ask()
    assert first.finish_reason == "tool_calls"
    assert first.message.reasoning_content == twin.THOUGHT
    [call] = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": twin.RESULT},
    ]
    assert ask().message.content == twin.answer_to(NUMBER)


def test_responses_and_error_classes(litellm, url):
    answer = litellm.responses(
        model="openai/m", input=twin.CASES[NUMBER][1], api_base=url, api_key="none"
    )
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="openai/gpt-4",
            messages=[{"role": "user", "content": "x"}],
            api_base=url,
            api_key="none",
        )
