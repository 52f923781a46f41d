"""`rose serve --scripted` over real HTTP: the client library, disconnects, a killed engine, a clean end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from urllib.parse import urlsplit

import httpx
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
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}


@pytest.fixture(scope="module")
def answering(scripted):
    """A server whose answers alternate: a sum, a call."""
    with scripted([{"text": ANSWER}, {"text": CALL}]) as server:
        yield server


def test_openais_client_reads_whole_answers_streams_and_errors(answering):
    openai = pytest.importorskip("openai", reason="the openai client library is not installed")
    with openai.OpenAI(base_url=f"{answering.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**CHAT, seed=1)
        message = whole.choices[0].message
        assert message.content == "The sum is 4."
        assert message.reasoning == message.reasoning_content == "Easy sum."
        assert whole.usage.completion_tokens_details.reasoning_tokens > 0
        assert whole._request_id

        with client.chat.completions.stream(**CHAT, tools=[TOOL]) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        call = final.choices[0].message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)["city"]) == (
            "get_weather",
            "Paris",
        )
        assert final.choices[0].finish_reason == "tool_calls"

        assert [model.id for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(**{**CHAT, "model": "gpt-4"})
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as unknown:
            client.chat.completions.create(**CHAT, extra_body={"no_such_field": 1})
        assert unknown.value.param == "no_such_field"
        text = client.completions.create(model="m", prompt="2+2=", max_tokens=5)
        assert text.choices[0].finish_reason == "length"
        client.completions.create(model="m", prompt=[1, 2, 3])  # keep the order of the script


def test_a_stream_equals_the_whole_answer(answering):
    whole = answering.http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]
    answering.http.post("/v1/chat/completions", json=CHAT)  # the call in between
    content = reasoning = ""
    finish = None
    with answering.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                content += choice["delta"].get("content", "")
                reasoning += choice["delta"].get("reasoning", "")
                finish = choice["finish_reason"] or finish
    assert line == "" or line == "data: [DONE]"
    message = whole["message"]
    assert (content, reasoning, finish) == (
        message["content"],
        message["reasoning"],
        whole["finish_reason"],
    )
    answering.http.post("/v1/chat/completions", json=CHAT)


def test_rose_chat_shows_reasoning_calls_and_content(answering, capsys):
    from rose.cli.main import run

    arguments = ["chat", "--url", answering.url, "--once", "2+2?"]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "Easy sum." in shown
    assert "The sum is 4." in shown
    assert run(arguments) == 0
    assert 'get_weather {"city":"Paris","days":2}' in capsys.readouterr().out
    assert run([*arguments, "--temperature", "-1"]) == 2
    assert "error: temperature=-1.0" in capsys.readouterr().err


def test_metrics_are_prometheus_text(answering):
    text = answering.http.get("/metrics").text
    assert "rose_time_to_first_token_seconds_bucket" in text
    assert "rose_requests_running " in text
    assert "rose_requests_total{" in text
    assert "_created" not in text


def _running(server) -> float:
    text = server.http.get("/metrics").text
    return float(text.split("\nrose_requests_running ")[1].split("\n")[0])


def _sent(server) -> float:
    text = server.http.get("/metrics").text
    return float(text.split("\nrose_engine_output_tokens_total ")[1].split("\n")[0])


def _until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def _send(connection, server, body):
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(server.url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    connection.sendall(head.encode() + raw)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(scripted, stream):
    text = "<|channel|>final<|message|>" + "word " * 4000
    with scripted([{"text": text, "delay_ms": 20}]) as server:
        where = urlsplit(server.url)
        with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
            _send(connection, server, {**CHAT, "stream": stream, "max_completion_tokens": 4000})
            seen = b""
            while stream and b'"content":"word' not in seen:
                seen += connection.recv(65536)
            _until(lambda: _running(server) == 1, 5, "the request never ran")
        # The engine's state is asked for once a second, so two seconds are the promise (load-disconnect).
        _until(lambda: _running(server) == 0, 2, "the request still runs")
        assert "rose_client_disconnects_total 1.0" in server.http.get("/metrics").text
        short = server.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
        assert short.status_code == 200


def test_without_restarts_a_killed_engine_ends_streams_turns_health_red_and_ends_the_server(
    scripted,
):
    text = "<|channel|>final<|message|>" + "word " * 4000
    options = ("--linger-s", "2", "--max-engine-restarts", "0")
    with scripted([{"text": text, "delay_ms": 10}], *options) as server:
        with server.http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            lines = response.iter_lines()
            while '"content":"' not in next(lines):
                pass
            killed = time.monotonic()
            os.kill(server.engine_pid(), signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2][6:])["error"]
        assert "SIGKILL" in error["message"]
        assert not any('"finish_reason":"stop"' in line for line in rest)
        assert server.http.get("/health").status_code == 503
        refused = server.http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert time.monotonic() - killed < 5
        assert server.process.wait(15) == 1
        assert any(line.startswith("error: ") and "SIGKILL" in line for line in server.lines)


def test_ctrl_c_ends_both_services_quietly(scripted):
    with scripted([{"text": ANSWER}]) as server:
        engine = server.engine_pid()
        assert server.http.get("/ready").status_code == 200
        assert server.stop() == 0
        assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines)
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)
        with pytest.raises(httpx.TransportError):
            server.http.get("/health")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["second Ctrl-C", "time is up"])
def test_an_answer_cut_by_the_end_is_told_so_and_nobody_sees_a_traceback(scripted, stream, how):
    text = "<|channel|>final<|message|>" + "word " * 4000
    limit = "60" if how == "second Ctrl-C" else "0.2"
    script = [{"text": text, "delay_ms": 20}]
    with scripted(script, "--shutdown-timeout-s", limit) as server:
        where = urlsplit(server.url)
        with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
            _send(connection, server, {**CHAT, "stream": stream, "max_completion_tokens": 4000})
            _until(lambda: _running(server) == 1, 5, "the request never ran")
            server.process.send_signal(signal.SIGINT)
            hint = f"stopping: waiting for 1 answer (at most {limit} s), Ctrl-C again ends at once"
            _until(lambda: hint in server.lines, 5, "no hint")
            if how == "second Ctrl-C":
                server.process.send_signal(signal.SIGINT)
            seen = b""
            while part := connection.recv(65536):
                seen += part
        assert b'"code":"shutting_down"' in seen
        assert b"send the request again" in seen
        assert seen.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
        assert (b"data: [DONE]" in seen) is stream
        assert server.process.wait(10) == 0
        assert not any("Traceback" in line or "Cancelled" in line for line in server.lines)
        assert "stopping: ending 1 answer that had not finished" in server.lines


def test_a_client_that_does_not_read_cannot_hold_the_server(scripted):
    text = "<|channel|>final<|message|>" + "word " * 4000
    with scripted([{"text": text}], "--shutdown-timeout-s", "60") as server:
        where = urlsplit(server.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((where.hostname, where.port))
            for _ in range(40):
                # Pipelined: the buffers of both sides are full long before the last answer.
                _send(connection, server, {**CHAT, "stream": True, "max_completion_tokens": 4000})
            _until(lambda: _sent(server) > 0, 5, "nothing runs")
            time.sleep(
                1
            )  # nothing tells when the buffers are full; a server that still writes passes too
            server.process.send_signal(signal.SIGINT)
            _until(lambda: any("stopping:" in line for line in server.lines), 5, "not stopping")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(10) == 0
        assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines)


def test_a_port_in_use_is_said_in_words(capsys, tmp_path):
    from rose.cli.main import run

    script = tmp_path / "script.jsonl"
    script.write_text('{"tokens": [1]}\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run(["serve", "--scripted", str(script), "--port", port]) == 2
    error = capsys.readouterr().err
    assert f"error: cannot listen on 127.0.0.1:{port}" in error
    assert "Traceback" not in error
