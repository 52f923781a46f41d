"""openai-python's Responses client against `rose serve --scripted`, over real HTTP."""

from __future__ import annotations

import json
import time

import pytest

ANSWER = (
    "<|channel|>analysis<|message|>Easy sum.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The sum is 4.<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Use it.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city":"Paris","days":2}<|call|>'
)
TOOL = {
    "type": "function",
    "name": "get_weather",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def openai_client(scripted):
    """OpenAI's client of a server whose answers alternate: a call, a sum."""
    openai = pytest.importorskip("openai", reason="the openai client library is not installed")
    with (
        scripted([{"text": CALL, "cached_tokens": 8}, {"text": ANSWER}]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_tool_loop_by_previous_response_id(openai_client):
    responses = openai_client.responses
    first = responses.create(model="m", input="Weather?", tools=[TOOL])
    reasoning, call = first.output
    assert reasoning.content[0].text == "Use it."
    assert json.loads(call.arguments)["city"] == "Paris"
    assert first.usage.input_tokens_details.cached_tokens == 8
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    second = responses.create(
        model="m", previous_response_id=first.id, input=[result], tools=[TOOL]
    )
    assert second.output_text == "The sum is 4."
    assert responses.retrieve(second.id).output == second.output
    items = list(responses.input_items.list(second.id, limit=2, order="asc"))
    assert [item.type for item in items] == [
        *("message", "reasoning", "function_call", "function_call_output")
    ]
    responses.delete(second.id)
    import openai

    with pytest.raises(openai.NotFoundError) as gone:
        responses.retrieve(second.id)
    assert gone.value.code == "response_not_found"


def test_a_tool_loop_of_items_without_a_store(openai_client):
    responses = openai_client.responses
    include = ["reasoning.encrypted_content"]
    history = [{"role": "user", "content": "Weather?"}]
    first = responses.create(model="m", input=history, tools=[TOOL], store=False, include=include)
    assert first.output[0].encrypted_content
    history += [item.model_dump(exclude_none=True) for item in first.output]
    call_id = first.output[-1].call_id
    history.append({"type": "function_call_output", "call_id": call_id, "output": "Sunny"})
    second = responses.create(model="m", input=history, tools=[TOOL], store=False, include=include)
    assert second.output_text == "The sum is 4."


def test_the_stream_helper_adds_up_to_what_the_server_says(openai_client):
    for expected in ("function_call", "message"):
        with openai_client.responses.stream(model="m", input="Hi", tools=[TOOL]) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        assert [item.type for item in final.output] == ["reasoning", expected]
        deltas = [e for e in events if e.type.endswith(("output_text.delta", "arguments.delta"))]
        text = "".join(event.delta for event in deltas)
        item = final.output[1]
        assert text == (final.output_text if expected == "message" else item.arguments)


def test_background_responses_are_polled_resumed_and_cancelled(openai_client):
    responses = openai_client.responses
    stream = responses.create(model="m", input="Hi", background=True, stream=True)
    events = [event for _, event in zip(range(4), stream, strict=False)]
    stream.close()
    response_id = events[0].response.id
    rest = list(
        responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
    )
    assert rest[0].sequence_number == events[-1].sequence_number + 1
    assert rest[-1].type == "response.completed"
    body = responses.create(model="m", input="Hi", background=True)
    end = time.monotonic() + 5
    while body.status in ("queued", "in_progress"):
        assert time.monotonic() < end
        body = responses.retrieve(body.id)
    assert responses.cancel(body.id).status == "completed"


def test_errors_are_of_the_clients_classes(openai_client):
    import openai

    with pytest.raises(openai.BadRequestError) as wrong:
        openai_client.responses.create(model="m", input="Hi", previous_response_id="resp_x")
    assert wrong.value.code == "previous_response_not_found"
    assert wrong.value.param == "previous_response_id"
    counted = openai_client.responses.input_tokens.count(model="m", input="Hi")
    assert counted.input_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("patience_s", ["10", "0.2"])
def test_a_background_response_outlives_its_server(scripted, tmp_path, patience_s):
    """Ctrl-C lets it finish, or keeps how far it came; the next server with the same file knows it."""
    options = ("--response-store", str(tmp_path / "kept"), "--shutdown-timeout-s", patience_s)
    text = "<|channel|>final<|message|>" + "word " * 30 + "<|return|>"
    body = {"model": "m", "input": "Hi", "background": True}
    with scripted([{"text": text, "delay_ms": 50}], *options) as server:
        url = f"/v1/responses/{server.http.post('/v1/responses', json=body).json()['id']}"
        while not server.http.get(url).json()["output"]:
            time.sleep(0.01)
        assert server.stop() == 0
        assert not any("Traceback" in line for line in server.lines), server.lines
    with scripted([{"text": ANSWER}], *options) as server:
        kept = server.http.get(url).json()
        events = server.http.get(url, params={"stream": "true", "starting_after": 3}).text
    said = kept["output"][0]["content"][0]["text"]
    if patience_s == "10":
        assert (kept["status"], said) == ("completed", "word " * 30)
    else:
        assert (kept["status"], kept["error"]["code"]) == ("failed", "server_error")
        assert "shutting down" in kept["error"]["message"]
        assert 0 < len(said) < 150
    assert f"event: response.{kept['status']}" in events
