"""The HTTP API over a fake engine: answers, streams, errors, states of the engine."""

from __future__ import annotations

import asyncio

import pytest

from fakes import openai_schemas
from rose.frontend.config import FrontendConfig
from rose.frontend.formatters.registry import build_formatter

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def _answer(lab):
    return lab.line([*lab.reasoning("Easy."), *lab.content("The sum is 4."), lab.END])


def _calling(lab, *calls):
    tokens = [token for c in calls for token in lab.call(*c)]
    return lab.line([*lab.reasoning("Use it."), *tokens, lab.END])


def _error(response, status, code, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["param"] == param
    return error["message"]


# ---- answers -----------------------------------------------------------------------------------------------


def test_a_whole_answer_has_content_reasoning_and_usage(lab):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            response = await server.chat()
            body = response.json()
            message = body["choices"][0]["message"]
            assert message["content"] == "The sum is 4."
            assert message["reasoning"] == message["reasoning_content"] == "Easy."
            assert "tool_calls" not in message
            assert body["choices"][0]["finish_reason"] == "stop"
            usage = body["usage"]
            assert usage["completion_tokens"] == len(server.engine.scripted._config.lines[0].tokens)
            assert usage["completion_tokens_details"]["reasoning_tokens"] == len("Easy.")
            assert usage["prompt_tokens"] == len(server.engine.requests[0].prompt_token_ids)
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert response.headers["x-request-id"].startswith("req_")

    lab.run(scenario)


def test_cached_tokens_are_reported(lab):
    async def scenario():
        async with lab.serving(lab.line(lab.content("x"), cached_tokens=16)) as server:
            usage = (await server.chat()).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 16

    lab.run(scenario)


def test_streamed_chunks_come_in_openais_order(lab):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            response = await server.chat(stream=True)
            assert response.headers["content-type"].startswith("text/event-stream")
            events = lab.sse(response)
            assert events[-1] == "[DONE]"
            chunks = events[:-1]
            assert len({chunk["id"] for chunk in chunks}) == 1
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
            kinds = [next(iter(c["choices"][0]["delta"]), "end") for c in chunks[1:]]
            assert kinds == sorted(kinds, key=["reasoning", "content", "end"].index)
            assert [c["choices"][0]["finish_reason"] for c in chunks].count("stop") == 1
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            assert not any("usage" in chunk for chunk in chunks)

    lab.run(scenario)


def test_usage_comes_last_where_it_is_asked_for(lab):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            options = {"include_usage": True}
            events = lab.sse(await server.chat(stream=True, stream_options=options))
            whole = (await server.chat()).json()["usage"]
            assert events[-2]["choices"] == []
            assert events[-2]["usage"] == whole
            assert all(chunk["usage"] is None for chunk in events[:-2])

    lab.run(scenario)


def _fold(chunks, index=0):
    message = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for piece in delta.get("tool_calls", []):
                if "id" in piece:
                    message["calls"].append([piece["function"]["name"], ""])
                message["calls"][piece["index"]][1] += piece["function"]["arguments"]
            message["finish"] = choice["finish_reason"] or message["finish"]
    return message


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize("stop", [None, ["sum is"], ["zzz", "4."]])
def test_a_stream_equals_the_whole_answer(lab, tokens_per_event, stop):
    tokens = [
        *lab.reasoning("Dénk: the sum is"),
        *lab.content("The sum is 4. 日本"),
        *lab.call("get_weather", '{"city":"Zürich"}'),
        *lab.call("get_weather", "{}"),
        lab.END,
    ]

    async def scenario():
        async with lab.serving(lab.line(tokens, tokens_per_event=tokens_per_event)) as server:
            whole = (await server.chat(tools=[TOOL], stop=stop)).json()["choices"][0]
            streamed = _fold(lab.sse(await server.chat(tools=[TOOL], stop=stop, stream=True))[:-1])
            message = whole["message"]
            assert streamed["content"] == (message["content"] or "")
            assert streamed["reasoning"] == message["reasoning"]
            calls = [
                [c["function"]["name"], c["function"]["arguments"]]
                for c in message.get("tool_calls", [])
            ]
            assert streamed["calls"] == calls
            assert streamed["finish"] == whole["finish_reason"]
            expected = {None: "The sum is 4. 日本", "sum is": "The ", "zzz": "The sum is "}
            assert message["content"] == expected[stop and stop[0]]

    lab.run(scenario)


def test_a_streamed_call_names_itself_once(lab):
    async def scenario():
        async with lab.serving(_calling(lab, ("get_weather", '{"city":"Paris"}'))) as server:
            chunks = lab.sse(await server.chat(tools=[TOOL], stream=True))[:-1]
            pieces = [p for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", [])]
            assert set(pieces[0]) == {"index", "id", "type", "function"}
            assert pieces[0]["function"]["name"] == "get_weather"
            assert all(
                set(p) == {"index", "function"} and "name" not in p["function"] for p in pieces[1:]
            )
            assert _fold(chunks)["calls"] == [["get_weather", '{"city":"Paris"}']]
            assert _fold(chunks)["finish"] == "tool_calls"

    lab.run(scenario)


def test_one_call_at_most_where_parallel_calls_are_off(lab):
    async def scenario():
        script = _calling(lab, ("get_weather", '{"a":1}'), ("get_weather", '{"b":2}'))
        async with lab.serving(script) as server:
            choice = (await server.chat(tools=[TOOL], parallel_tool_calls=False)).json()["choices"][
                0
            ]
            calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
            assert calls == ['{"a":1}']
            assert choice["finish_reason"] == "tool_calls"
            assert server.engine.aborted == [server.engine.requests[0].request_id]

    lab.run(scenario)


def test_tool_choice_none_hides_the_tools_from_the_prompt(lab):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            await server.chat(tools=[TOOL], tool_choice="none")
            await server.chat(tools=[TOOL], tool_choice="auto")
            hidden, shown = server.formatter.conversations
            assert "tools" not in hidden
            assert shown["tools"] == [TOOL]

    lab.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice_none_turns_a_call_into_text(lab, stream):
    async def scenario():
        async with lab.serving(_calling(lab, ("get_weather", '{"a":1}'))) as server:
            response = await server.chat(tools=[TOOL], tool_choice="none", stream=stream)
            if stream:
                folded = _fold(lab.sse(response)[:-1])
                assert (folded["content"], folded["calls"]) == ('get_weather {"a":1}', [])
                assert folded["finish"] == "stop"
            else:
                [choice] = response.json()["choices"]
                assert choice["message"]["content"] == 'get_weather {"a":1}'
                assert choice["finish_reason"] == "stop"

    lab.run(scenario)


def test_choices_are_separate_and_seeds_differ(lab):
    async def scenario():
        lines = [_calling(lab, ("get_weather", text)) for text in ('{"c":"Paris"}', '{"c":"Lyon"}')]
        async with lab.serving(*lines) as server:
            events = lab.sse(await server.chat(tools=[TOOL], n=2, seed=2**63 - 1, stream=True))
            assert events.count("[DONE]") == 1
            folded = [_fold(events[:-1], index) for index in (0, 1)]
            assert [f["calls"][0][1] for f in folded] == ['{"c":"Paris"}', '{"c":"Lyon"}']
            seeds = [request.sampling.seed for request in server.engine.requests]
            assert seeds == [2**63 - 1, -(2**63)]
            ids = {
                p["id"]
                for e in events[:-1]
                for c in e["choices"]
                for p in c["delta"].get("tool_calls", [])
                if "id" in p
            }
            assert len(ids) == 2

    lab.run(scenario)


def test_reasoning_can_be_left_out_and_is_still_counted(lab):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            body = (await server.chat(include_reasoning=False)).json()
            assert "reasoning" not in body["choices"][0]["message"]
            assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5

    lab.run(scenario)


def test_sampling_and_limits_reach_the_engine(lab):
    async def scenario():
        async with lab.serving(_answer(lab), context_tokens=1000) as server:
            await server.chat(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=7, max_tokens=9)
            await server.chat(max_completion_tokens=5, max_tokens=9)
            await server.chat()
            first, second, third = server.engine.requests
            sampling = first.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)
            assert (sampling.min_p, sampling.seed, first.max_tokens) == (0.1, 7, 9)
            assert second.max_tokens == 5
            assert third.max_tokens == 1000 - len(third.prompt_token_ids)
            assert first.stop_token_ids == [lab.END]

    lab.run(scenario)


def test_priority_and_timeout_reach_the_engine_or_are_refused_with_the_range(lab):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            await server.chat(priority=-3, timeout=2.5)
            await server.complete()
            asked = [(r.priority, r.timeout_s) for r in server.engine.requests]
            assert asked == [(-3, 2.5), (0, None)]
            for field, value in (("priority", 2**70), ("timeout", 0), ("timeout", 1e9)):
                response = await server.chat(**{field: value})
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["param"] == field
                assert "allowed" in error["message"]

    lab.run(scenario)


def test_an_answer_whose_time_is_up_is_504(lab):
    async def scenario():
        slow = lab.line(lab.content("a" * 50), delay_ms=20)
        async with lab.serving(slow) as server:
            response = await server.chat(timeout=0.05)
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "request_timeout"
            events = lab.sse(await server.chat(timeout=0.05, stream=True))
            assert events[-2]["error"]["code"] == "request_timeout"

    lab.run(scenario)


def test_a_cache_salt_reaches_the_engine(lab):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            await server.chat(cache_salt="tenant")
            await server.chat()
            assert [r.cache_salt for r in server.engine.requests] == ["tenant", ""]

    lab.run(scenario)


def test_the_day_is_part_of_the_conversation(lab):
    async def scenario():
        config = FrontendConfig(conversation_date="2025-08-05")
        async with lab.serving(_answer(lab), config=config) as server:
            await server.chat()
            assert server.formatter.conversations[0]["conversation_date"] == "2025-08-05"

    lab.run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_ends_with_length(lab, stream):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            response = await server.chat(max_tokens=8, stream=stream)
            if stream:
                assert _fold(lab.sse(response)[:-1])["finish"] == "length"
            else:
                assert response.json()["choices"][0]["finish_reason"] == "length"
                assert response.json()["usage"]["completion_tokens"] == 8

    lab.run(scenario)


# ---- completions -------------------------------------------------------------------------------------------


def test_completions_answer_texts_and_token_lists(lab):
    async def scenario():
        lines = [lab.line(lab.content(text)) for text in ("one", "two", "three", "four")]
        async with lab.serving(*lines) as server:
            body = (await server.complete(prompt=["a", "b"], n=2)).json()
            assert [c["text"] for c in body["choices"]] == ["one", "two", "three", "four"]
            assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
            assert body["object"] == "text_completion"
            assert body["usage"]["prompt_tokens"] == 2
            await server.complete(prompt=[1, 2, 3])
            assert server.engine.requests[-1].prompt_token_ids == [1, 2, 3]
            assert server.engine.requests[-1].max_tokens == 16

    lab.run(scenario)


def test_a_completion_stream_equals_the_whole(lab):
    async def scenario():
        async with lab.serving(lab.line(lab.content("Hello, world"))) as server:
            whole = (await server.complete(stop="wor")).json()["choices"][0]
            events = lab.sse(await server.complete(stop="wor", stream=True))
            assert events[-1] == "[DONE]"
            text = "".join(c["text"] for e in events[:-1] for c in e["choices"])
            assert text == whole["text"] == "Hello, "
            assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"

    lab.run(scenario)


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], [[]], [1.5], [True]])
def test_mixed_prompts_are_refused(lab, prompt):
    async def scenario():
        async with lab.serving() as server:
            _error(await server.complete(prompt=prompt), 400, "invalid_request", "prompt")

    lab.run(scenario)


def test_token_ids_outside_the_vocabulary_are_refused(lab):
    async def scenario():
        async with lab.serving(vocab_size=300) as server:
            message = _error(
                await server.complete(prompt=[1, 300]), 400, "invalid_request", "prompt"
            )
            assert "300" in message
            assert "0 to 299" in message

    lab.run(scenario)


# ---- errors ------------------------------------------------------------------------------------------------

WRONG_CHATS = [
    ({"model": "gpt-4"}, 404, "model_not_found", "model"),
    ({"model": 5}, 400, "invalid_request", "model"),
    ({"messages": "Hi"}, 400, "invalid_request", "messages"),
    ({"messages": []}, 400, "invalid_request", "messages"),
    (
        {"messages": [{"role": "wizard", "content": "x"}]},
        400,
        "invalid_request",
        "messages[0].role",
    ),
    ({"messages": [{"content": "x"}]}, 400, "invalid_request", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_request", "messages[0].content"),
    (
        {"messages": [{"role": "user", "contents": "x"}]},
        400,
        "unknown_field",
        "messages[0].contents",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "unsupported_value",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": "unrenderable"}]},
        400,
        "invalid_request",
        "messages[0]",
    ),
    ({"max_token": 5}, 400, "unknown_field", "max_token"),
    ({"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
    ({"max_tokens": "5"}, 400, "invalid_request", "max_tokens"),
    ({"max_tokens": 10**9}, 400, "context_length_exceeded", "max_tokens"),
    ({"temperature": -1}, 400, "invalid_request", "temperature"),
    ({"temperature": "hot"}, 400, "invalid_request", "temperature"),
    ({"top_p": 0}, 400, "invalid_request", "top_p"),
    ({"min_p": 2}, 400, "invalid_request", "min_p"),
    ({"seed": 2**64}, 400, "invalid_request", "seed"),
    ({"n": 0}, 400, "invalid_request", "n"),
    ({"n": 129}, 400, "invalid_request", "n"),
    ({"stop": ""}, 400, "invalid_request", "stop"),
    ({"stop": ["a"] * 17}, 400, "invalid_request", "stop"),
    ({"stop": [1]}, 400, "invalid_request", "stop[0]"),
    ({"logprobs": 3}, 400, "invalid_request", "logprobs"),
    ({"top_logprobs": 3}, 400, "invalid_request", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_request", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, 400, "invalid_request", "top_logprobs"),
    ({"logit_bias": {"x": 1}}, 400, "invalid_request", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "invalid_request", "logit_bias"),
    ({"logit_bias": {"201088": 1}}, 400, "invalid_request", "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, 400, "invalid_request", "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "invalid_request", "logit_bias"),
    ({"logit_bias": {"5": None}}, 400, "invalid_request", "logit_bias"),
    (
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        400,
        "invalid_request",
        "logit_bias",
    ),
    ({"repetition_penalty": 0}, 400, "invalid_request", "repetition_penalty"),
    ({"frequency_penalty": 3}, 400, "invalid_request", "frequency_penalty"),
    ({"min_tokens": -1}, 400, "invalid_request", "min_tokens"),
    ({"min_tokens": 2**70}, 400, "invalid_request", "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, 400, "invalid_request", "min_tokens"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_value", "response_format"),
    ({"presence_penalty": -2.5}, 400, "invalid_request", "presence_penalty"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_request", "stream_options"),
    (
        {"stream": True, "stream_options": {"usage": 1}},
        400,
        "unknown_field",
        "stream_options.usage",
    ),
    ({"tool_choice": "required"}, 400, "invalid_request", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "required"}, 400, "unsupported_value", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "always"}, 400, "invalid_request", "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        400,
        "unsupported_value",
        "tool_choice",
    ),
    ({"tools": [{"type": "web_search"}]}, 400, "invalid_request", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, 400, "invalid_request", "tools[0].function"),
    (
        {"tools": [{"type": "function", "function": {}}]},
        400,
        "invalid_request",
        "tools[0].function.name",
    ),
]


@pytest.mark.parametrize(("change", "status", "code", "param"), WRONG_CHATS)
def test_wrong_chat_requests_are_answered(lab, change, status, code, param):
    async def scenario():
        async with lab.serving() as server:
            _error(await server.chat(**change), status, code, param)
            assert server.engine.requests == []

    lab.run(scenario)


def test_an_unknown_field_is_answered_with_the_near_one(lab):
    async def scenario():
        async with lab.serving() as server:
            message = _error(await server.chat(temprature=1), 400, "unknown_field", "temprature")
            assert "did you mean temperature" in message

    lab.run(scenario)


def test_fields_without_effect_and_nulls_are_accepted(lab):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            ignored = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
            empty = {
                "logprobs": False,
                "presence_penalty": 0,
                "logit_bias": None,
                "stop": None,
                "tools": None,
            }
            response = await server.chat(
                **ignored, **empty, response_format={"type": "text"}, n=None
            )
            assert response.status_code == 200

    lab.run(scenario)


def test_an_answer_can_be_sent_back_as_history(lab):
    async def scenario():
        async with lab.serving(_calling(lab, ("get_weather", "{}"))) as server:
            message = (await server.chat(tools=[TOOL])).json()["choices"][0]["message"]
            tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "20"}
            history = [{"role": "user", "content": "Hi"}, message, tool]
            assert (await server.chat(messages=history, tools=[TOOL])).status_code == 200

    lab.run(scenario)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"a":"\xff"}'],
)
def test_malformed_json_is_answered(lab, body):
    async def scenario():
        async with lab.serving() as server:
            for path in ("/v1/chat/completions", "/v1/completions"):
                _error(await server.http.post(path, content=body), 400, "invalid_json")

    lab.run(scenario)


def test_missing_fields_are_named(lab):
    async def scenario():
        async with lab.serving() as server:
            post = server.http.post
            _error(await post("/v1/chat/completions", json={}), 400, "invalid_request", "model")
            _error(
                await post("/v1/completions", json={"model": "m"}), 400, "invalid_request", "prompt"
            )

    lab.run(scenario)


def test_error_messages_are_bounded(lab):
    async def scenario():
        async with lab.serving() as server:
            for change in (
                {"model": "x" * 100_000},
                {"y" * 100_000: 1},
                {"tool_choice": "z" * 100_000, "tools": [TOOL]},
                {"messages": [{"role": "r" * 100_000, "content": "x"}]},
                {"messages": [{"role": "user", "content": "x", "z" * 100_000: 1}]},
            ):
                response = await server.chat(**change)
                assert response.status_code in (400, 404)
                assert len(response.content) < 2000

    lab.run(scenario)


@pytest.mark.parametrize("name", ["logit_bias", "tool_choice"])
def test_values_at_any_depth_of_nesting_are_refused_not_failed_on(lab, name):
    """Near the recursion limit JSON can be read that cannot be printed any more."""

    async def scenario():
        async with lab.serving(raise_bugs=False) as server:
            for depth in (10, *range(900, 1000, 5), 5000):
                value = '{"a":' * depth + "1" + "}" * depth
                body = (
                    f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],"{name}":{value}}}'
                )
                response = await server.http.post("/v1/chat/completions", content=body.encode())
                assert response.status_code == 400, depth
                assert len(response.content) < 2000

    lab.run(scenario)


def test_numbers_of_prompts_and_stop_strings_are_bounded_before_any_work(lab):
    async def scenario():
        async with lab.serving() as server:
            response = await server.complete(prompt=["a"] * 20_000, n=128)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "prompt")
            assert "2560000 answers; allowed: 1024 per request" in error["message"]
            response = await server.chat(stop=["b", "a" * 5000])
            assert "a string of 5000 characters" in response.json()["error"]["message"]

    lab.run(scenario)


def test_a_top_k_that_cannot_travel_is_refused(lab):
    async def scenario():
        async with lab.serving(lab.line(lab.content("x"))) as server:
            response = await server.chat(top_k=2**64)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "top_k")
            assert (await server.chat(top_k=2**63 - 1)).status_code == 200
            # What is taken is what is told, -1 included.
            assert "-1" in response.json()["error"]["message"]
            assert (await server.chat(top_k=-1)).status_code == 200

    lab.run(scenario)


def test_a_prompt_over_the_context_is_refused_with_numbers(lab):
    async def scenario():
        async with lab.serving(context_tokens=50) as server:
            messages = [{"role": "user", "content": "x" * 100}]
            message = _error(
                await server.chat(messages=messages), 400, "context_length_exceeded", "messages"
            )
            num_tokens = len(str(messages).replace("'", '"'))
            assert f"{num_tokens} tokens" in message
            assert "50" in message

    lab.run(scenario)


def test_other_routes_methods_types_and_sizes_are_answered(lab):
    async def scenario():
        config = FrontendConfig(max_request_bytes=1024)
        async with lab.serving(config=config) as server:
            _error(await server.http.get("/nope"), 404, "not_found")
            response = await server.http.get("/v1/chat/completions")
            _error(response, 405, "method_not_allowed")
            assert response.headers["allow"] == "POST"
            form = {"content-type": "application/x-www-form-urlencoded"}
            path = "/v1/chat/completions"
            _error(
                await server.http.post(path, content=b"a=1", headers=form),
                415,
                "unsupported_media_type",
            )
            _error(await server.http.post(path, content=b"x" * 2000), 413, "request_too_large")

            async def parts():
                for _ in range(20):
                    yield b"x" * 100

            _error(await server.http.post(path, content=parts()), 413, "request_too_large")
            _error(await server.http.get("/v1/models/other"), 404, "model_not_found", "model")

    lab.run(scenario)


def test_a_full_queue_is_429_with_retry_after(lab):
    async def scenario():
        slow = lab.line(lab.content("x" * 50), delay_ms=20)
        async with lab.serving(slow, max_running=1) as server:
            first = asyncio.create_task(server.chat())
            await asyncio.sleep(0.05)
            for stream in (False, True):
                response = await server.chat(stream=stream)
                _error(response, 429, "rate_limit_exceeded")
                assert int(response.headers["retry-after"]) >= 1
                assert int(response.headers["retry-after-ms"]) >= 1
            assert (await first).status_code == 200

    lab.run(scenario)


@pytest.mark.parametrize("is_after_tokens", [False, True])
def test_an_engine_error_in_a_stream_is_an_event_not_an_end(lab, is_after_tokens):
    async def scenario():
        tokens = lab.content("abc") if is_after_tokens else []
        async with lab.serving(lab.line(tokens, error="out of memory")) as server:
            response = await server.chat(stream=True)
            if not is_after_tokens:
                assert "out of memory" in _error(response, 500, "engine_failed")
                return
            assert response.status_code == 200
            events = lab.sse(response)
            assert events[-1] == "[DONE]"
            assert events[-2]["error"]["message"] == "out of memory"
            assert _fold(events[:-2])["content"] == "abc"
            assert _fold(events[:-2])["finish"] is None
            _error(await server.chat(), 500, "engine_failed")

    lab.run(scenario)


# ---- states of the engine and the server -------------------------------------------------------------------


def test_before_the_engine_is_ready_requests_wait_outside(lab):
    async def scenario():
        async with lab.serving(is_ready=False) as server:
            assert (await server.http.get("/health")).status_code == 200
            ready = await server.http.get("/ready")
            assert ready.status_code == 503
            assert ready.json() == {"status": "loading", "detail": "loading layer 3 of 24"}
            response = await server.chat()
            assert "loading layer 3" in _error(response, 503, "engine_loading")
            assert "retry-after" in response.headers

    lab.run(scenario)


def test_a_dead_engine_ends_streams_and_turns_health_red(lab):
    async def scenario():
        slow = lab.line(lab.content("x" * 1000), delay_ms=5)
        async with lab.serving(slow) as server:
            assert (await server.http.get("/ready")).status_code == 200
            stream = asyncio.create_task(server.chat(stream=True))
            await asyncio.sleep(0.1)
            server.client.mark_dead("the engine's process ended with code 70")
            events = lab.sse(await stream)
            assert "code 70" in events[-2]["error"]["message"]
            assert _fold(events[:-2])["finish"] is None
            for path in ("/health", "/ready"):
                response = await server.http.get(path)
                assert response.status_code == 503
                assert response.json()["status"] == "failed"
            assert "code 70" in _error(await server.chat(), 503, "engine_unavailable")

    lab.run(scenario)


def test_a_silent_engine_counts_as_stuck(lab):
    async def scenario():
        config = FrontendConfig(engine_timeout_s=0.05)
        async with lab.serving(config=config) as server:

            async def silent():
                await asyncio.sleep(60)

            server.engine.receive = silent
            await asyncio.sleep(0.3)
            response = await server.http.get("/health")
            assert response.status_code == 503
            assert "no progress for" in response.json()["detail"]

    lab.run(scenario)


def test_models_lists_every_name(lab):
    async def scenario():
        async with lab.serving(context_tokens=4096) as server:
            body = (await server.http.get("/v1/models")).json()
            assert [model["id"] for model in body["data"]] == ["m", "alias"]
            assert body["data"][0]["max_model_len"] == 4096
            assert (await server.http.get("/v1/models/alias")).json()["id"] == "alias"
            assert (await server.chat(model="alias")).json()["model"] == "m"

    lab.run(scenario)


def test_a_request_id_is_echoed_if_it_is_harmless(lab):
    async def scenario():
        async with lab.serving() as server:
            get = server.http.get
            assert (await get("/health", headers={"x-request-id": "abc-1"})).headers[
                "x-request-id"
            ] == "abc-1"
            odd = (await get("/health", headers={"x-request-id": "a b" * 100})).headers[
                "x-request-id"
            ]
            assert odd.startswith("req_")

    lab.run(scenario)


def test_metrics_count_requests_tokens_and_times(lab):
    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            await server.chat()
            await server.chat(stream=True)
            await server.chat(nonsense=1)
            text = (await server.http.get("/metrics")).text
            lines = dict(
                line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
            )
            assert lines['rose_requests_total{endpoint="chat",finish="stop",status="200"}'] == "2.0"
            assert (
                lines['rose_requests_total{endpoint="chat",finish="error",status="400"}'] == "1.0"
            )
            assert lines['rose_generation_tokens_total{kind="reasoning"}'] == "10.0"
            num_tokens = len(server.engine.scripted._config.lines[0].tokens)
            assert lines["rose_time_to_first_token_seconds_count"] == "2.0"
            assert lines["rose_inter_token_latency_seconds_count"] == f"{2 * (num_tokens - 1)}.0"
            assert lines["rose_engine_ready"] == "1.0"
            assert lines["rose_requests_waiting"] == "0.0"

    lab.run(scenario)


def test_lenient_reading_is_counted_by_kind(lab, o200k):
    text = "<|channel|>analysis<|message|>a<|end|><|return|>final<|message|>Hi.<|return|>"

    async def scenario():
        line = lab.line(o200k.encode_with_control(text))
        async with lab.serving(line, formatter=build_formatter("harmony", o200k)) as server:
            assert (await server.chat()).json()["choices"][0]["message"]["content"]
            page = (await server.http.get("/metrics")).text
            for kind in ("stop_between_messages", "missing_start"):
                assert f'rose_harmony_parse_recoveries_total{{kind="{kind}"}} 1.0' in page

    lab.run(scenario)


def test_a_bug_is_a_json_500_and_later_requests_work(lab):
    async def scenario():
        async with lab.serving(_answer(lab), raise_bugs=False) as server:
            right = server.formatter.encode
            server.formatter.encode = lambda conversation: 1 / 0
            _error(await server.chat(), 500, "internal_error")
            server.formatter.encode = right
            server.formatter.decoder = lambda **_: None
            _error(await server.chat(), 500, "internal_error")
            del server.formatter.decoder
            assert (await server.chat()).status_code == 200

    lab.run(scenario)


def test_the_schema_oracle_finds_a_broken_answer():
    chunk = {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [],
    }
    assert openai_schemas.problems("chat.completion.chunk", chunk) == []
    assert openai_schemas.problems("chat.completion.chunk", {**chunk, "created": "now"})
    assert openai_schemas.problems("error", {"error": {"message": "x"}})
    stream = 'event: {}\ndata: {{"type":"response.queued","sequence_number":1}}\n\n'
    for name in ("response.queued", "response.created"):  # no response in it; and another's name
        with pytest.raises(AssertionError):
            openai_schemas.check_response(
                "/v1/responses", 200, "text/event-stream", stream.format(name)
            )


def test_what_clients_add_to_an_answer_may_come_back_with_it(lab):
    call = {
        "id": "c1",
        "type": "function",
        "index": 0,
        "provider_specific_fields": {},
        "function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}},
    }
    answer = {
        "role": "assistant",
        "tool_calls": [call],
        **dict.fromkeys(["refusal", "annotations", "audio", "function_call"]),
        "parsed": {"a": 1},
        "raw_messages": [{}],
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "x"}

    async def scenario():
        async with lab.serving(_answer(lab)) as server:
            asked = {"role": "user", "content": "Hi"}
            assert (await server.chat(messages=[asked, answer, result])).status_code == 200
            wrong = await server.chat(messages=[asked, {**answer, "thinking": 1}, result])
            _error(wrong, 400, "unknown_field", "messages[1].thinking")

    lab.run(scenario)
