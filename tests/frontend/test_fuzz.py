"""Whatever JSON a client sends, the answer is an answer or a named mistake, never a failure of ours."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.frontend.formatters.registry import build_formatter
from rose.frontend.schemas import ChatRequest, CompletionRequest

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXT = st.text(max_size=20)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "refusal", "image_url"])}, optional={"text": TEXT | JSON}
)
CALL = st.fixed_dictionaries(
    {"id": st.sampled_from(["c1", "c2"]), "type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT | JSON}) | JSON},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "other"])},
    optional={
        "content": TEXT | st.lists(PART, max_size=3) | JSON,
        "tool_calls": st.lists(CALL, max_size=2) | JSON,
        "tool_call_id": st.sampled_from(["c1", "c2"]) | JSON,
        "name": TEXT | JSON,
        "reasoning": TEXT,
    },
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": TEXT, "parameters": JSON}),
    }
)
FIELDS = [*ChatRequest.__struct_fields__, "logprobs", "response_format", "user", "nonsense"]


@pytest.fixture(scope="module")
def harmony(o200k):
    return build_formatter("harmony", o200k)


@pytest.fixture(scope="module")
def plain(o200k):
    return build_formatter("plain", o200k)


def _post_all(lab, formatter, path, bodies, line):
    async def scenario():
        async with lab.serving(line, formatter=formatter) as server:
            for body in bodies:
                raw = json.dumps(body).encode()
                response = await server.http.post(path, content=raw)
                assert response.status_code in (200, 400, 404), (body, response.text)
                if response.status_code != 200:
                    assert len(response.content) < 4000, body

    lab.run(scenario)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    bodies=st.lists(
        st.fixed_dictionaries(
            {"model": st.just("m"), "messages": st.lists(MESSAGE, max_size=4) | JSON},
            optional={
                "tools": st.lists(TOOL | JSON, max_size=2),
                "stream": st.booleans(),
                **{
                    name: JSON
                    for name in ("temperature", "seed", "stop", "n", "tool_choice", "max_tokens")
                },
            },
        )
        | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5)
        | JSON,
        min_size=8,
        max_size=8,
    )
)
def test_any_chat_body_is_answered(lab, harmony, o200k, bodies):
    text = "<|channel|>final<|message|>x<|return|>"
    _post_all(
        lab, harmony, "/v1/chat/completions", bodies, lab.line(o200k.encode_with_control(text))
    )


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    bodies=st.lists(
        st.fixed_dictionaries(
            {
                "model": st.just("m"),
                "prompt": TEXT | st.lists(st.integers(-1, 300_000), max_size=3) | JSON,
            }
        )
        | st.dictionaries(
            st.sampled_from([*CompletionRequest.__struct_fields__, "echo"]), JSON, max_size=5
        ),
        min_size=8,
        max_size=8,
    )
)
def test_any_completion_body_is_answered(lab, plain, bodies):
    _post_all(lab, plain, "/v1/completions", bodies, lab.line([24912]))
