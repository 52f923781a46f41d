"""The server on a real socket: TLS, keys from a file, what is no HTTP, heads without end."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import time
from urllib.parse import urlsplit

import httpx
import pytest

from fakes.servers import RunningServer, scripted_server
from rose.cli import main as cli_main

LINES = [{"text": "<|channel|>final<|message|>Hi.<|return|>"}]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += [
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=rose",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("the openssl command is missing")
    return cert, key


def test_tls_and_a_key_file(tmp_path, certificate):
    cert, key = certificate
    keys = tmp_path / "keys"
    keys.write_text("open-sesame\n")
    options = ("--ssl-certfile", cert, "--ssl-keyfile", key, "--api-key-file", keys)
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps(LINES[0]))
    server = RunningServer("--scripted", str(script), *map(str, options))
    try:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=server.url, verify=context) as http:
            assert http.get("/health").status_code == 200
            assert http.get("/v1/models").status_code == 401
            headers = {"authorization": "Bearer open-sesame"}
            assert http.get("/v1/models", headers=headers).status_code == 200
            # The client keeps its connection, and says no farewell: nobody waits for it, which took 16 s.
            begin = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begin < 12
    finally:
        if server.process.poll() is None:
            server.stop()
    assert "open-sesame" not in "".join(server.lines)
    assert any("GET /v1/models: 401 in" in line for line in server.lines)


@pytest.mark.parametrize(
    "options",
    [
        ["--ssl-certfile", "nowhere.pem"],
        ["--ssl-keyfile", "key.pem"],
        ["--api-key-file", "nowhere"],
        ["--allowed-origins", "chat.example"],
    ],
)
def test_wrong_options_end_before_anything_starts(tmp_path, capsys, options):
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps(LINES[0]))
    assert cli_main.run(["serve", "--scripted", str(script), "--port", "0", *options]) == 2
    assert options[0] in capsys.readouterr().err


def test_what_is_no_http_gets_the_error_object(tmp_path):
    with scripted_server(tmp_path, LINES) as server:
        for raw, status, code in (
            (b"hello\r\n\r\n", 400, "invalid_http"),
            (b"GET / HTTP/1.1\r\nx: " + b"a" * 400_000, 431, "head_too_large"),
            (b"GET /" + b"a" * 400_000, 431, "head_too_large"),
            (b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 100_000, 431, "head_too_large"),
        ):
            head, body = _raw(server.url, raw)
            assert head.startswith(b"HTTP/1.1 %d " % status), raw[:40]
            error = json.loads(body)["error"]
            assert error["code"] == code
            assert set(error) == {"message", "type", "param", "code"}
        long_body = {"model": "m", "messages": [{"role": "user", "content": "x" * 300_000}]}
        for _ in range(2):  # the same connection
            response = server.http.post("/v1/chat/completions", json=long_body)
            assert response.status_code == 200
        upgrade = {"connection": "upgrade", "upgrade": "websocket"}
        assert server.http.get("/v1/models", headers=upgrade).status_code == 200


def _raw(url, request):
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        # The server may close while we still send, and what it said may be followed by a reset.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        return head, body
