"""The API cases collected from public bug reports (tests/data/handed.jsonl), answered through Harmony."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rose.frontend.config import FrontendConfig
from rose.frontend.formatters.registry import build_formatter

DATA = Path(__file__).parents[1] / "data" / "handed.jsonl"
CASES = {case["id"]: case for case in map(json.loads, DATA.read_text().splitlines())}
ELSEWHERE = {
    "api-responses-function-call": "frontend/responses/test_create.py",
    "api-responses-stream-indices": "frontend/responses/test_create.py",
    "api-tool-choice-required": "e2e/test_answer_forms.py",  # with a model
}


@pytest.fixture(scope="module")
def harmony(o200k):
    return build_formatter("harmony", o200k)


@pytest.fixture
def play(lab, harmony, o200k):
    """Return a function that sends the body of a case and answers with the text its model emits."""

    def play(case_id, *texts, stream=None, **line_fields):
        given = CASES[case_id]["input"]
        texts = texts or given.get("model_emits_per_choice") or [given.get("model_emits", "")]
        lines = [lab.line(o200k.encode_with_control(text), **line_fields) for text in texts]
        body = dict(given["body"])
        if stream is not None:
            body["stream"] = stream

        async def scenario():
            async with lab.serving(*lines, formatter=harmony) as server:
                return await server.http.post(given["post"], json=body)

        return lab.run(scenario)

    return play


def _chunks(lab, response):
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.rstrip().endswith("data: [DONE]")
    return lab.sse(response)[:-1]


def _pieces(chunks, index=0):
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return [piece for choice in choices for piece in choice["delta"].get("tool_calls", [])]


def _finish(chunks, index=0):
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    return choices[-1]["finish_reason"]


def _text(chunks, name):
    return "".join(c["delta"].get(name) or "" for chunk in chunks for c in chunk["choices"])


@pytest.mark.parametrize("case_id", [case_id for case_id in CASES if case_id.startswith("api-")])
def test_every_api_case_has_a_test(case_id):
    path = Path(__file__).parents[1] / ELSEWHERE.get(case_id, "frontend/test_handed_api.py")
    _, _, tests = path.read_text().partition("def test_")
    assert case_id in tests


def test_keys_guard_every_route(lab):
    case = CASES["api-key-covers-all-routes"]
    config = FrontendConfig(api_key=(case["input"]["server"]["api_key"],))

    async def scenario():
        async with lab.serving(config=config) as server:
            for asked in case["input"]["requests"]:
                method, path = next(iter(asked.items()))
                response = await server.http.request(method, path, headers=asked["headers"])
                assert response.status_code == 401, path
                assert response.json()["error"]["message"]

    lab.run(scenario)


def test_streamed_tool_call(lab, play):
    expected = CASES["api-stream-tool-call"]["expected"]["sse"]
    chunks = _chunks(lab, play("api-stream-tool-call"))
    assert {chunk["object"] for chunk in chunks} == {expected["every_chunk"]["object"]}
    assert len({(chunk["id"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == expected["first_delta_role"]
    first, *rest = _pieces(chunks)
    call = expected["tool_calls"]
    assert (first["index"], first["type"], first["function"]["name"]) == (
        0,
        "function",
        call["name"],
    )
    assert first["id"]
    assert not any("id" in piece or "name" in piece["function"] for piece in rest)
    assert "".join(p["function"]["arguments"] for p in (first, *rest)) == call["concat_arguments"]
    assert _text(chunks, "content") == expected["content_deltas_concat"]
    assert not any(
        bad in _text(chunks, "reasoning") for bad in expected["content_must_not_contain"]
    )
    assert _finish(chunks) == expected["last_choice_finish_reason"]


def test_stream_equals_nonstream(lab, play):
    expected = CASES["api-stream-equals-nonstream"]["expected"]
    whole = play("api-stream-equals-nonstream", stream=False).json()["choices"][0]
    chunks = _chunks(lab, play("api-stream-equals-nonstream", stream=True))
    assert _text(chunks, "content") == whole["message"]["content"] == expected["content"]
    assert _text(chunks, "reasoning") == whole["message"]["reasoning"] == "Easy sum."
    assert _finish(chunks) == whole["finish_reason"] == "stop"


def test_no_usage_chunk_unless_asked(lab, play):
    chunks = _chunks(lab, play("api-no-usage-unasked"))
    assert all(chunk["choices"] for chunk in chunks)


def test_usage_counts_reasoning(play):
    expected = CASES["api-usage-counts-reasoning"]["expected"]["usage"]
    usage = play("api-usage-counts-reasoning").json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] > expected["prompt_tokens_gt"]
    assert usage["completion_tokens"] in expected["completion_tokens_in"]
    low, high = expected["reasoning_tokens_between"]
    assert low <= usage["completion_tokens_details"]["reasoning_tokens"] <= high


def test_tool_choice_without_tools_is_refused(play):
    response = play("api-tool-choice-without-tools")
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_call_cut_by_the_limit_ends_with_length(lab, play):
    chunks = _chunks(lab, play("api-call-cut-by-length"))
    assert _finish(chunks) == "length"


def test_a_failure_after_the_first_chunk_is_an_event(lab, play):
    text = "<|channel|>final<|message|>one two three"
    chunks = _chunks(lab, play("api-midstream-error", text, error="device lost"))
    assert chunks[-1]["error"]["message"] == "device lost"
    assert _text(chunks[:-1], "content") == "one two three"
    assert all(c["finish_reason"] is None for chunk in chunks[:-1] for c in chunk["choices"])


def test_arguments_that_are_no_json_are_passed_on(play):
    expected = CASES["api-invalid-json-args"]["expected"]["body"]
    choice = play("api-invalid-json-args").json()["choices"][0]
    assert choice["finish_reason"] == expected["finish_reason"]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == expected["tool_calls"]


def test_a_tool_message_without_a_call_is_refused(play):
    response = play("api-tool-id-without-call")
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["param"] == "messages[1].tool_call_id"


def test_two_choices_stream_their_own_calls(lab, play):
    expected = CASES["api-n2-tools-stream"]["expected"]["sse"]
    chunks = _chunks(lab, play("api-n2-tools-stream"))
    for index, choice in enumerate(expected["per_choice"]):
        pieces = _pieces(chunks, index)
        assert pieces[0]["function"]["name"] == choice["name"]
        assert "".join(p["function"]["arguments"] for p in pieces) == choice["concat_arguments"]
        assert _finish(chunks, index) == choice["finish_reason"]
    assert _pieces(chunks, 0)[0]["id"] != _pieces(chunks, 1)[0]["id"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_are_those_of_the_content(lab, play, is_stream):
    expected = CASES["api-logprobs-final-only"]["expected"]["logprobs"]
    response = play("api-logprobs-final-only", stream=is_stream)
    if is_stream:
        found = [c["logprobs"] for chunk in _chunks(lab, response) for c in chunk["choices"]]
        entries = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert text == expected["concat_bytes_equals_content"]
    for entry in entries:
        assert expected["no_token_contains"] not in entry["token"]
        assert set(expected["each_has"]) <= set(entry)
        assert len(entry["top_logprobs"]) == expected["top_logprobs_len"]
        assert all(e["logprob"] <= 0 for e in (entry, *entry["top_logprobs"]))


def test_stop_strings_are_searched_in_content_only(lab, harmony, o200k):
    text = (
        "<|channel|>analysis<|message|>say STOP first<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Answer STOP more<|return|>"
    )

    async def scenario():
        line = lab.line(o200k.encode_with_control(text))
        async with lab.serving(line, formatter=harmony) as server:
            choice = (await server.chat(stop=["STOP"])).json()["choices"][0]
            assert choice["message"]["content"] == "Answer "
            assert choice["message"]["reasoning"] == "say STOP first"
            assert choice["finish_reason"] == "stop"
            assert len(server.engine.aborted) == 1

    lab.run(scenario)


def test_reasoning_effort_reaches_the_prompt_or_is_refused(lab, harmony, o200k):
    async def scenario():
        line = lab.line(o200k.encode_with_control("<|channel|>final<|message|>x<|return|>"))
        async with lab.serving(line, formatter=harmony) as server:
            assert (await server.chat(reasoning_effort="high")).status_code == 200
            prompt = server.engine.requests[0].prompt_token_ids
            text = b"".join(map(o200k.token_bytes, prompt)).decode()
            assert "Reasoning: high" in text
            response = await server.chat(reasoning_effort="utmost")
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "reasoning_effort"

    lab.run(scenario)
