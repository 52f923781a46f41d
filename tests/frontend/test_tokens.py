"""Routes that speak of tokens, and what completions have besides text."""

from __future__ import annotations

import asyncio

import pytest

from rose.frontend.config import FrontendConfig
from rose.frontend.formatters.registry import build_formatter

ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"


@pytest.fixture(scope="module")
def formats(o200k):
    return {
        "formatter": build_formatter("harmony", o200k),
        "text": build_formatter("plain", o200k),
    }


def _refused(response, param, code="invalid_request"):
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


# ---- tokenize, detokenize ----------------------------------------------------------------------------------


def test_text_to_tokens_and_back(lab, formats, o200k):
    text = "naïve 😀 <|end|> x"

    async def scenario():
        async with lab.serving(**formats, context_tokens=1000) as server:
            body = {"prompt": text, "return_token_strs": True, "model": "m"}
            answer = (await server.http.post("/tokenize", json=body)).json()
            assert answer["tokens"] == o200k.encode(text)
            assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 1000)
            assert len(answer["token_strs"]) == answer["count"]
            assert not any(o200k.control_name(i) for i in answer["tokens"])
            back = await server.http.post("/detokenize", json={"tokens": answer["tokens"]})
            assert back.json() == {"prompt": text}
            control = await server.http.post("/detokenize", json={"tokens": [200002, 13225]})
            assert control.json() == {"prompt": "<|return|>Hello"}
            for prompt in ("", "x" * 50_000):
                answer = (await server.http.post("/tokenize", json={"prompt": prompt})).json()
                assert answer["tokens"] == o200k.encode(prompt)

    lab.run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "invalid_request"),
        ("/tokenize", {"prompt": 1}, "prompt", "invalid_request"),
        ("/tokenize", {"promt": "x"}, "promt", "unknown_field"),
        ("/detokenize", {"tokens": "x"}, "tokens", "invalid_request"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "invalid_request"),
        ("/detokenize", {"tokens": [201_088]}, "tokens", "invalid_request"),
        ("/detokenize", {"tokens": [2**70]}, "tokens", "invalid_request"),
        ("/v1/generate", {"model": "m"}, "prompt_token_ids", "invalid_request"),
        ("/v1/generate", {"model": "m", "prompt_token_ids": []}, "prompt_token_ids", ""),
        ("/v1/generate", {"model": "m", "prompt_token_ids": [300_000]}, "prompt_token_ids", ""),
        ("/v1/generate", {"model": "m", "prompt_token_ids": [1], "stop": "x"}, "stop", "unsupp"),
        ("/v1/generate", {"model": "m", "prompt_token_ids": [1], "logprobs": 21}, "logprobs", ""),
        (
            "/v1/generate",
            {"model": "m", "prompt_token_ids": [1], "max_tokens": 0},
            "max_tokens",
            "",
        ),
        (
            "/v1/generate",
            {"model": "m", "prompt_token_ids": [1], "stop_token_ids": [-1]},
            "stop_token_ids",
            "",
        ),
        (
            "/v1/generate",
            {"model": "m", "prompt_token_ids": [1], "stop_token_ids": [1] * 65},
            "stop_token_ids",
            "",
        ),
        ("/v1/completions/render", {"model": "m", "prompt": []}, "prompt", ""),
        ("/v1/chat/completions/render", {"model": "m", "messages": []}, "messages", ""),
    ],
)
def test_wrong_bodies_are_named(lab, formats, path, body, param, code):
    codes = {"": "invalid_request", "unsupp": "unsupported_value"}

    async def scenario():
        async with lab.serving(**formats) as server:
            _refused(await server.http.post(path, json=body), param, codes.get(code, code))
            assert server.engine.requests == []

    lab.run(scenario)


def test_another_model_is_not_found(lab, formats):
    async def scenario():
        async with lab.serving(**formats) as server:
            for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
                response = await server.http.post(path, json={"model": "other", **body})
                assert response.status_code == 404

    lab.run(scenario)


# ---- render ------------------------------------------------------------------------------------------------


def test_rendering_is_what_the_engine_would_get(lab, formats, o200k):
    async def scenario():
        line = lab.line(o200k.encode_with_control(ANSWER))
        async with lab.serving(line, **formats) as server:
            chat = {"messages": [{"role": "user", "content": "Hi <|end|>"}], "max_tokens": 7}
            response = await server.http.post(
                "/v1/chat/completions/render", json={"model": "m", **chat}
            )
            assert server.engine.requests == []
            await server.chat(**chat)
            [entry] = response.json()["data"]
            request = server.engine.requests[0]
            assert entry["token_ids"] == request.prompt_token_ids
            assert entry["stop_token_ids"] == request.stop_token_ids
            assert entry["max_tokens"] == request.max_tokens == 7
            assert entry["text"].endswith("<|message|>Hi <|end|><|end|><|start|>assistant")

            body = {"model": "m", "prompt": ["a", "b"], "n": 2}
            rendered = await server.http.post("/v1/completions/render", json=body)
            assert [e["text"] for e in rendered.json()["data"]] == ["a", "b"]
            assert len(server.engine.requests) == 1

    lab.run(scenario)


# ---- tokens in, tokens out ---------------------------------------------------------------------------------


def test_requests_in_tokens_that_run_together_get_their_own_tokens(lab, formats):
    lines = [[1000 + number] * 40 for number in range(6)]

    async def ask(server, endpoint, body):
        return (await server.http.post(endpoint, json={"model": "m", **body})).json()

    async def scenario():
        async with lab.serving(*(lab.line(t, tokens_per_event=2) for t in lines), **formats) as s:
            body = {"prompt_token_ids": [13225], "stop_token_ids": [], "max_tokens": 40}
            answers = await asyncio.gather(*(ask(s, "/v1/generate", body) for _ in lines))
            found = [answer["choices"][0]["token_ids"] for answer in answers]
            assert sorted(found) == lines
            ids = {request.request_id for request in s.engine.requests}
            assert len(ids) == len({answer["id"] for answer in answers}) == len(lines)

    lab.run(scenario)


def test_tokens_in_tokens_out(lab, formats, o200k):
    tokens = o200k.encode_with_control(ANSWER)

    async def scenario():
        line = lab.line(tokens, tokens_per_event=3, cached_tokens=1)
        async with lab.serving(line, **formats) as server:
            body = {"model": "m", "prompt_token_ids": [13225, 200012], "logprobs": 2, "n": 2}
            whole = (await server.http.post("/v1/generate", json=body)).json()
            assert [c["token_ids"] for c in whole["choices"]] == [tokens, tokens]
            assert {c["finish_reason"] for c in whole["choices"]} == {"stop"}
            assert whole["usage"]["completion_tokens"] == 2 * len(tokens)
            assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
            scores = whole["choices"][0]["logprobs"]
            assert [s["top_token_ids"][0] for s in scores] == tokens
            assert {(s["logprob"], len(s["top_logprobs"])) for s in scores} == {(0.0, 2)}
            request = server.engine.requests[0]
            assert request.prompt_token_ids == [13225, 200012]
            assert set(request.stop_token_ids) == {200002, 200012, 199999}

            options = {"stream": True, "stream_options": {"include_usage": True}}
            response = await server.http.post("/v1/generate", json={**body, **options})
            assert _folded(lab.sse(response)) == (whole["choices"], whole["usage"])

            limits = {"logprobs": None, "stop_token_ids": [], "max_tokens": 2, "n": 1}
            short = (await server.http.post("/v1/generate", json={**body, **limits})).json()
            assert short["choices"] == [
                {"index": 0, "token_ids": tokens[:2], "logprobs": None, "finish_reason": "length"}
            ]
            assert server.engine.requests[-1].stop_token_ids == []

    lab.run(scenario)


def _folded(events):
    assert events.pop() == "[DONE]"
    choices = [{"index": i, "token_ids": [], "logprobs": [], "finish_reason": None} for i in (0, 1)]
    usage = events.pop()["usage"]
    for event in events:
        for choice in event["choices"]:
            whole = choices[choice["index"]]
            whole["token_ids"] += choice["token_ids"]
            whole["logprobs"] += choice["logprobs"]
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
    return choices, usage


def test_hidden_reasoning_closes_tokens_out(lab, formats):
    async def scenario():
        async with lab.serving(**formats, config=FrontendConfig(reasoning="hidden")) as server:
            body = {"model": "m", "prompt_token_ids": [1]}
            assert (await server.http.post("/v1/generate", json=body)).status_code == 403
            assert (await server.http.post("/tokenize", json={"prompt": "x"})).status_code == 200

    lab.run(scenario)


# ---- completions -------------------------------------------------------------------------------------------


def test_echo_begins_the_text_with_the_prompt(lab, formats, o200k):
    async def scenario():
        line = lab.line(o200k.encode(" world. END more"), tokens_per_event=2)
        async with lab.serving(line, **formats) as server:
            prompts = ["Hello END", "Hallo"]
            for prompt in (prompts, [o200k.encode(text) for text in prompts]):
                fields = {"prompt": prompt, "echo": True, "stop": " END", "n": 2}
                body = (await server.complete(**fields)).json()
                texts = [choice["text"] for choice in body["choices"]]
                assert texts == [f"{prompts[i // 2]} world." for i in range(4)]
                events = lab.sse(await server.complete(**fields, stream=True))
                streamed = [""] * 4
                for event in events[:-1]:
                    for choice in event["choices"]:
                        streamed[choice["index"]] += choice["text"]
                assert streamed == texts

    lab.run(scenario)


def test_completions_refuse_what_they_cannot_do(lab, formats):
    async def scenario():
        async with lab.serving(lab.line([13225]), **formats) as server:
            _refused(await server.complete(echo=True, logprobs=1), "echo", "unsupported_value")
            _refused(await server.complete(best_of=3), "best_of", "unsupported_value")
            _refused(await server.complete(n=3, best_of=2), "best_of", "unsupported_value")
            _refused(await server.complete(suffix="x"), "suffix", "unsupported_value")
            for fields in ({"best_of": 2, "n": 2}, {"echo": False, "logprobs": 1}, {"best_of": 1}):
                assert (await server.complete(**fields)).status_code == 200

    lab.run(scenario)
