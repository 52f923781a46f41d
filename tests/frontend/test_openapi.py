"""The description of the API is that of the routes, holds what they answer, and needs no other server to be shown."""

from __future__ import annotations

import functools
import re

import jsonschema
import pytest

from fakes import malformed
from rose.frontend.config import FrontendConfig
from rose.frontend.formatters.registry import build_formatter
from rose.frontend.generation import SAMPLING_NUMBERS
from rose.frontend.openapi import EXAMPLES, NARROWER, OPERATIONS, document
from rose.frontend.schemas import SamplingFields
from rose.protocol.sampling_params import SamplingParams

ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"


@functools.cache
def _validator(name):
    described = document(("m", "alias"), has_keys=False)
    schema = {"components": described["components"], "$ref": f"#/components/schemas/{name}"}
    return jsonschema.Draft202012Validator(schema)


def _validate(name, value):
    _validator(name).validate(value)


@pytest.fixture(scope="module")
def formats(o200k):
    return {
        "formatter": build_formatter("harmony", o200k),
        "text": build_formatter("plain", o200k),
    }


def test_every_route_is_described_and_nothing_else(lab):
    async def scenario():
        async with lab.serving() as server:
            there = set()
            for route in server.app.router.routes:
                path = re.sub(r":\w+}", "}", route.path)
                there |= {(method.lower(), path) for method in route.methods - {"HEAD"}}
            assert {(o.method, o.path) for o in OPERATIONS} == there
            served = (await server.http.get("/openapi.json")).json()
            assert served == document(("m", "alias"), has_keys=False)
            assert sum(map(len, served["paths"].values())) == len(OPERATIONS)

    lab.run(scenario)


def test_every_reference_leads_somewhere():
    described = document(("m", "alias"), has_keys=True)
    names = set(re.findall(r"#/components/schemas/(\w+)", str(described)))
    assert names <= set(described["components"]["schemas"])
    assert described["security"] == [{"key": []}]
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    chat = described["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert "reasoning" in chat["properties"]["include_reasoning"]["description"]


@pytest.mark.parametrize("name", SAMPLING_NUMBERS)
def test_bounds_are_those_of_the_engine(name):
    schema = NARROWER[SamplingFields][name]
    is_whole = schema["type"][0] == "integer"
    step = 1 if is_whole else 1e-3
    for key, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1)):
        if key not in schema:
            continue
        bound = schema[key]
        inside = bound - sign * step * (key == "exclusiveMinimum")
        # the API's own way to write "all"
        inside, outside = (
            0 if v == -1 and name == "top_k" else v for v in (inside, bound + sign * step)
        )
        assert SamplingParams(**{name: inside}).problems() == []
        if outside != 0:
            assert SamplingParams(**{name: outside}).problems() != []


@pytest.mark.parametrize("path", malformed.BODIES)
def test_bodies_and_answers_fit_their_schemas(lab, formats, o200k, path):
    operation = next(o for o in OPERATIONS if o.path == path and o.method == "post")
    body = {**malformed.BODIES[path]}
    _validate(operation.request.__name__, body)
    _validate(operation.request.__name__, {"model": "m", **EXAMPLES[operation.request]})
    body.pop("stream", None)
    body.pop("stream_options", None)

    async def scenario():
        line = lab.line(o200k.encode_with_control(ANSWER))
        async with lab.serving(line, **formats) as server:
            response = await server.http.post(path, json=body)
            assert response.status_code == 200
            _validate(operation.answer.__name__, response.json())
            wrong = await server.http.post(path, json={**body, "nonsense": 1})
            _validate("ErrorBody", wrong.json())
            with pytest.raises(jsonschema.ValidationError, match="nonsense"):
                _validate(operation.request.__name__, {**body, "nonsense": 1})

    lab.run(scenario)


def test_the_page_is_whole_by_itself(lab):
    async def scenario():
        async with lab.serving(config=FrontendConfig(api_key=("k",))) as server:
            headers = {"authorization": "Bearer k"}
            response = await server.http.get("/docs", headers=headers)
            assert response.headers["content-type"].startswith("text/html")
            assert "Authorization: Bearer" in response.text
            assert "<script" not in response.text
            links = re.findall(r'(?:src|href)="([^"]*)"', response.text)
            assert "/openapi.json" in links
            assert all(link.startswith(("#", "/")) for link in links)
            targets = set(re.findall(r'id="(\w+)"', response.text))
            assert {link[1:] for link in links if link[0] == "#"} <= targets
            for operation in OPERATIONS:
                assert operation.path in response.text

    lab.run(scenario)
