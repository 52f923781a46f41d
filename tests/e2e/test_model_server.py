"""Both services on a synthetic tiny gpt-oss: JSON in, tokens through the real engine, JSON out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import jsonschema
import pytest

from fakes.servers import RunningServer

CONTEXT_TOKENS = 1024
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    pytest.importorskip("torch", reason="the engine needs torch")
    from rose.cli.main import run

    folder = tmp_path_factory.mktemp("model") / "tiny"
    assert run(["synth", str(folder), "--size", "tiny", "--layers", "2"]) == 0
    return folder


@pytest.fixture(scope="module")
def server(model_folder):
    options = (
        "--device",
        "cpu",
        "--max-step-tokens",
        "512",
        "--context-tokens",
        str(CONTEXT_TOKENS),
        "--linger-s",
        "1",
    )
    server = RunningServer(str(model_folder), *options)
    with httpx.Client(base_url=server.url, timeout=60) as server.http:
        yield server
    server.stop()


def _chat(server, **change):
    response = server.http.post("/v1/chat/completions", json={**CHAT, **change})
    assert response.status_code == 200, response.text
    return response.json()


def _stream(server, **change):
    chunks = []
    body = {**CHAT, **change, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
    assert line == "" or line == "data: [DONE]"
    return chunks


def _text(chunks, name):
    return "".join(c["delta"].get(name) or "" for chunk in chunks for c in chunk["choices"])


def _said(answer):
    message = answer["choices"][0]["message"]
    return message["content"] or "", message.get("reasoning", "")


def test_greedy_answers_repeat_and_the_limit_is_kept(server):
    first, second = _chat(server, temperature=0), _chat(server, temperature=0)
    assert _said(first) == _said(second)
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["usage"]["completion_tokens"] == CHAT["max_tokens"]
    assert first["usage"]["prompt_tokens"] > 50


def test_a_stream_is_the_same_answer(server):
    whole = _chat(server, seed=3)
    chunks = _stream(server, seed=3)
    assert (_text(chunks, "content"), _text(chunks, "reasoning")) == _said(whole)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_equal_seeds_give_equal_answers_whatever_shares_the_batch(server):
    alone = _said(_chat(server, seed=7))
    assert _said(_chat(server, seed=8)) != alone
    answers: dict[int, tuple] = {}

    def ask(seed):
        answers[seed] = _said(_chat(server, seed=seed))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[7] == alone


def test_a_conversation_over_the_context_is_refused_with_numbers(server):
    long = {"messages": [{"role": "user", "content": "word " * CONTEXT_TOKENS}]}
    response = server.http.post("/v1/chat/completions", json={**CHAT, **long})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT_TOKENS) in error["message"]


def test_completions_take_text_and_ids(server):
    body = {"model": "tiny", "prompt": ["Once", "Twice"], "max_tokens": 4, "temperature": 0}
    both = server.http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    ids = {**body, "prompt": [1500, 1501]}
    assert server.http.post("/v1/completions", json=ids).json()["usage"]["prompt_tokens"] == 2


def test_a_biased_token_is_written_and_its_own_probability_reported(server):
    """OpenAI's client through both services: the bias decides, the log-probability is the model's."""
    openai = pytest.importorskip("openai", reason="the openai client library is not installed")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    ask = {
        "model": "tiny",
        "prompt": "Once",
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 2,
        "logit_bias": {"1500": 100},
    }
    whole = client.completions.create(**ask).choices[0]
    assert whole.logprobs.tokens == [whole.logprobs.tokens[0]] * 4
    assert "".join(whole.logprobs.tokens) == whole.text
    for chosen, top in zip(whole.logprobs.token_logprobs, whole.logprobs.top_logprobs, strict=True):
        # one of 3,072 tokens of a model of random weights
        assert chosen < -1
        assert len(top) == 3
        assert min(top.values()) == chosen
    chunks = list(client.completions.create(**ask, stream=True))
    found = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert [value for part in found for value in part.token_logprobs] == (
        whole.logprobs.token_logprobs
    )


def _gauge(server, name):
    text = server.http.get("/metrics").text
    return float(text.split(f"\n{name} ")[1].split("\n")[0])


def test_a_prompt_that_comes_again_is_found_and_answered_alike(server):
    ask = {"messages": [{"role": "user", "content": "again " * 150}], "temperature": 0}
    first, second = (_chat(server, **ask, cache_salt="a") for _ in range(2))
    other = _chat(server, **ask, cache_salt="b")
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second, other)]
    whole_pages = (first["usage"]["prompt_tokens"] - 1) // 64 * 64
    assert cached == [0, whole_pages, 0]
    assert whole_pages > 64
    assert _said(first) == _said(second) == _said(other)
    begin = time.monotonic()
    # The state is told once a second, and may be told while the last request still holds its pages.
    while not (
        _gauge(server, "rose_prefix_cache_hits_tokens_total") >= whole_pages
        and _gauge(server, "rose_kv_pages_idle") > 0
    ):
        assert time.monotonic() - begin < 3.0
        time.sleep(0.05)
    refused = server.http.post("/v1/chat/completions", json={**CHAT, "cache_salt": "x" * 257})
    assert refused.status_code == 400
    assert "cache_salt has 257 characters" in refused.json()["error"]["message"]


SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "b"]},
        "numbers": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    },
    "required": ["word", "kind", "numbers"],
    "additionalProperties": False,
}


def _value(server, seed):
    """Return an answer of SCHEMA; the model has never learnt to end its reasoning, which ends all the same."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    answer = _chat(server, response_format=form, seed=seed, max_tokens=700)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop", choice
    return json.loads(choice["message"]["content"])


def test_a_schema_holds_for_a_model_that_has_learnt_nothing(server):
    values = [_value(server, seed) for seed in (7, 8)]
    for value in values:
        jsonschema.validate(value, SCHEMA)
    assert values[0] != values[1]


@pytest.mark.slow
def test_an_engine_that_was_started_anew_holds_answers_to_their_form(server):
    before = _value(server, 7)
    os.kill(server.engine_pid(), signal.SIGKILL)
    for status in (503, 200):
        end = time.monotonic() + 60
        while server.http.get("/ready").status_code != status:
            assert time.monotonic() < end, f"/ready did not turn {status}"
            time.sleep(0.02)
    assert _value(server, 7) == before


def test_a_client_that_leaves_gives_its_pages_back(server):
    body = {**CHAT, "stream": True, "max_tokens": 400}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    left = time.monotonic()
    while _gauge(server, "rose_requests_running") > 0 or _gauge(server, "rose_kv_pages_used") > 0:
        assert time.monotonic() - left < 3.0  # the state is told once a second
        time.sleep(0.05)
    assert _gauge(server, "rose_client_disconnects_total") == 1
    assert _chat(server)["choices"]


def test_a_damaged_model_is_said_in_one_line(model_folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    shard = max(broken.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    os.truncate(shard, 100_000)
    command = [sys.executable, "-m", "rose.cli.main", "serve", str(broken), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) >= 1
    assert shard.name in errors[0]
    assert "100000 bytes" in errors[0]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGKILL, []),
        (signal.SIGHUP, ["--frontends", "2", "--api-key", "a-secret-of-the-server"]),
    ],
)
def test_a_server_that_is_killed_leaves_neither_an_engine_nor_a_folder(number, options):
    # With several frontends the folder holds keys, answers and counts besides sockets.
    server = RunningServer(*options)
    engine = server.engine_pid()
    words = Path(f"/proc/{engine}/cmdline").read_text().split("\0")
    [address] = [word for word in words if word.startswith("ipc://")]
    folder = Path(address.removeprefix("ipc://")).parent
    assert folder.is_dir()
    server.process.send_signal(number)
    server.process.wait()
    end = time.monotonic() + 20
    while (folder.exists() or Path(f"/proc/{engine}/cmdline").exists()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not folder.exists()
    assert not Path(f"/proc/{engine}").exists() or not Path(f"/proc/{engine}/cmdline").read_bytes()
