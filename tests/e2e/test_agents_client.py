"""The OpenAI Agents SDK against `rose serve --scripted`: its tool loop on both APIs, streamed and not."""

from __future__ import annotations

import asyncio
import json

import pytest

from fakes import compatibility as twin
from rose.frontend.o200k import O200kTokenizer

agents = pytest.importorskip("agents", reason="openai-agents is not installed: pip install .[test]")
ONE_PER_TOOL = range(0, 30, 5)


@pytest.fixture(scope="module")
def url(scripted):
    with scripted(twin.script(O200kTokenizer(), twin.CASES)) as server:
        yield f"{server.url}/v1"


def _tool(name, calls):
    parameters, description = twin.TOOLS[name]

    async def called(_, arguments):
        calls.append((name, json.loads(arguments)))
        return twin.RESULT

    return agents.FunctionTool(
        name=name,
        description=description,
        params_json_schema=parameters,
        on_invoke_tool=called,
        strict_json_schema=False,
    )


async def _ask(model, number, *, is_stream):
    """Return the calls, the final answer and the types of the streamed events of one question."""
    calls, events = [], []
    tools = [_tool(name, calls) for name in twin.TOOLS]
    agent = agents.Agent(name="twin", model=model, tools=tools)
    config = agents.RunConfig(tracing_disabled=True)
    question = twin.CASES[number][1]
    if not is_stream:
        result = await agents.Runner.run(agent, question, run_config=config)
    else:
        result = agents.Runner.run_streamed(agent, question, run_config=config)
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                events.append(event.data.type)
    return calls, result.final_output, events


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_the_tool_loop(url, api, is_stream):
    openai = pytest.importorskip("openai", reason="the openai client library is not installed")

    async def scenario():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            model = getattr(agents, api)("m", client)
            for number in ONE_PER_TOOL:
                name, _, arguments = twin.CASES[number]
                calls, answer, events = await _ask(model, number, is_stream=is_stream)
                assert calls == [(name, arguments)]
                assert answer == twin.answer_to(number)
                if is_stream:
                    assert events.count("response.completed") == 2
                    assert any("reasoning" in kind for kind in events)

    asyncio.run(scenario())
