"""Malformed requests get 4xx and leave nothing behind; no text of any field becomes a control token."""

from __future__ import annotations

import gc
import json

import pytest

from fakes import malformed
from rose.frontend.formatters.registry import build_formatter

NUM_REQUESTS = 1200
"""Of the 10,000 that `make soak` sends to a real server."""
ANSWER = "<|channel|>final<|message|>Hi.<|return|>"


@pytest.fixture(scope="module")
def formats(o200k):
    return {
        "formatter": build_formatter("harmony", o200k),
        "text": build_formatter("plain", o200k),
    }


@pytest.mark.parametrize("path", malformed.BODIES)
def test_the_bodies_that_are_changed_were_right(lab, formats, o200k, path):
    async def scenario():
        line = lab.line(o200k.encode_with_control(ANSWER))
        async with lab.serving(line, **formats) as server:
            response = await server.http.post(path, json=malformed.BODIES[path])
            assert response.status_code == 200, response.text

    lab.run(scenario)


def test_malformed_requests_are_refused_and_leave_nothing(lab, formats, o200k):
    async def scenario():
        async with lab.serving(lab.line([200002]), **formats) as server:
            num_objects = []
            for batch in range(3):
                for request in malformed.malformed(batch, NUM_REQUESTS // 3):
                    response = await server.http.post(request.path, content=request.body)
                    assert 400 <= response.status_code < 500, (request, response.text)
                    assert len(response.content) < 4000, request
                gc.collect()
                num_objects.append(len(gc.get_objects()))
            assert server.engine.requests == []
            assert server.client.num_open == 0
            assert num_objects[2] - num_objects[1] < 2000, num_objects

    lab.run(scenario)


def test_no_text_becomes_a_control_token(lab, formats, o200k):
    """A body with control tokens in any one field reaches the engine with those of its harmless twin, or not at all."""

    async def scenario():
        line = lab.line(o200k.encode_with_control(ANSWER))
        async with lab.serving(line, **formats) as server:
            num_accepted, twins = 0, {}
            for path, body, twin in malformed.with_control_tokens():
                before = len(server.engine.requests)
                response = await server.http.post(path, json=body)
                assert response.status_code < 500, (path, body, response.text)
                requests = server.engine.requests[before:]
                assert bool(requests) == (response.status_code == 200 and _runs(path))
                if not requests:
                    continue
                num_accepted += 1
                key = json.dumps([path, twin])
                if key not in twins:
                    assert (await server.http.post(path, json=twin)).status_code == 200
                    twins[key] = _control(o200k, server.engine.requests[-1].prompt_token_ids)
                assert _control(o200k, requests[0].prompt_token_ids) == twins[key], body
            assert num_accepted > 60

    lab.run(scenario)


def test_a_forged_token_would_be_found(o200k):
    ids = o200k.encode_with_control("a<|end|>b")
    assert _control(o200k, ids) == ["<|end|>"]
    assert _control(o200k, o200k.encode("a<|end|>b")) == []


def _runs(path):
    return path not in ("/tokenize", "/detokenize", "/v1/chat/completions/render")


def _control(o200k, token_ids):
    return [name for i in token_ids if (name := o200k.control_name(i)) is not None]
