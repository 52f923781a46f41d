"""Keys, origins, limits, time-outs, logs: who may ask for what, and what is told to whom."""

from __future__ import annotations

import json
import logging

import pytest

from rose.frontend.access import read_keys
from rose.frontend.config import FrontendConfig
from rose.frontend.parsing import MAX_JSON_DEPTH
from rose.utils.errors import ConfigError

KEYS = ("first-key", "second-key")
ROUTES = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("GET", "/metrics"),
    ("GET", "/nowhere"),
    ("PUT", "/v1/models"),
)


def _error(response, status, code):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error["message"]


# ---- keys --------------------------------------------------------------------------------------------------


def test_every_route_but_health_and_readiness_asks_for_a_key(lab):
    async def scenario():
        async with lab.serving(config=FrontendConfig(api_key=KEYS)) as server:
            for method, path in ROUTES:
                for value in (None, "", "Bearer", "Bearer wrong", "Basic first-key", "first-key"):
                    headers = {} if value is None else {"authorization": value}
                    response = await server.http.request(method, path, headers=headers)
                    _error(response, 401, "invalid_api_key")
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert "x-request-id" in response.headers
                    assert "first-key" not in response.text
                for key in KEYS:
                    headers = {"authorization": f"bearer {key}"}
                    response = await server.http.request(method, path, headers=headers)
                    assert response.status_code != 401
            for path in ("/health", "/ready"):
                assert (await server.http.get(path)).status_code == 200

    lab.run(scenario)


def test_every_route_there_is_is_among_those_tested(lab):
    """A route added later is guarded because the check stands before all of them; it shall be listed here too."""

    async def scenario():
        async with lab.serving(config=FrontendConfig(api_key=KEYS)) as server:
            for route in server.app.router.routes:
                path = route.path.replace("{name:path}", "m").replace("{", "").replace("}", "")
                method = max(route.methods - {"HEAD"})
                response = await server.http.request(method, path)
                is_open = path in ("/health", "/ready")
                assert (response.status_code == 401) != is_open, path

    lab.run(scenario)


def test_keys_come_from_options_file_and_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# people\nfrom-file\n\n  spaced  \n")
    config = FrontendConfig(api_key=("flag",), api_key_file=str(file))
    keys = read_keys(config, {"ROSE_API_KEY": "one, two\nthree"})
    assert keys == ["flag", "one", "two", "three", "from-file", "spaced"]
    assert read_keys(FrontendConfig(), {}) == []
    assert "flag" not in repr(config)


def test_an_empty_key_leaves_no_server_open():
    with pytest.raises(ConfigError, match="an API key is empty"):
        read_keys(FrontendConfig(api_key=("",)), {})
    assert read_keys(FrontendConfig(), {"ROSE_API_KEY": ""}) == []


@pytest.mark.parametrize("content", [None, "", "# none\n", "two words\n", "ключ\n", "x" * 513])
def test_key_files_that_hold_no_usable_key_are_refused(tmp_path, content):
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="--api-key-file") as caught:
        read_keys(FrontendConfig(api_key_file=str(file)), {})
    assert "two words" not in str(caught.value)


def test_a_wrong_key_is_compared_with_every_key(lab, monkeypatch):
    """The time of an answer must not tell which key was nearly right."""
    compared = []
    from rose.frontend import access

    def compare(a, b):
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(access.hmac, "compare_digest", compare)

    async def scenario():
        async with lab.serving(config=FrontendConfig(api_key=KEYS)) as server:
            for key in ("wrong", *KEYS):
                compared.clear()
                headers = {"authorization": f"Bearer {key}"}
                await server.http.get("/v1/models", headers=headers)
                assert len(compared) == len(KEYS)
                assert {len(part) for pair in compared for part in pair} == {32}

    lab.run(scenario)


# ---- web pages ---------------------------------------------------------------------------------------------


def test_web_pages_are_refused_unless_they_are_listed(lab):
    async def scenario():
        listed = FrontendConfig(allowed_origins=("https://chat.example",), api_key=KEYS)
        preflight = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        }
        async with lab.serving(config=listed) as server:
            for origin, status in (("https://evil.example", 403), ("https://chat.example", 204)):
                headers = {"origin": origin, **preflight}
                response = await server.http.options("/v1/chat/completions", headers=headers)
                assert response.status_code == status
                granted = response.headers.get("access-control-allow-origin")
                assert granted == (origin if status == 204 else None)
            assert "authorization" in response.headers["access-control-allow-headers"]
            bearer = {"authorization": "Bearer first-key"}
            right = {"origin": "https://chat.example", **bearer}
            response = await server.http.get("/v1/models", headers=right)
            assert response.headers["access-control-allow-origin"] == "https://chat.example"
            assert response.headers["vary"] == "origin"
            wrong = {"origin": "https://evil.example", **bearer}
            _error(await server.http.get("/v1/models", headers=wrong), 403, "permission_denied")
            # an answer of 401 must be readable for the page that may ask
            refused = await server.http.get("/v1/models", headers={"origin": right["origin"]})
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == right["origin"]

    lab.run(scenario)


def test_no_web_page_may_ask_by_default_but_the_servers_own(lab):
    async def scenario():
        async with lab.serving(lab.line(lab.content("x"))) as server:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            for origin, status in (("null", 403), ("http://other", 403), ("http://rose", 200)):
                headers = {"origin": origin}
                post = server.http.post("/v1/chat/completions", json=body, headers=headers)
                assert (await post).status_code == status
            assert len(server.engine.requests) == 1

    lab.run(scenario)


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://a b"])
def test_origins_that_no_browser_sends_are_refused_at_the_start(origin):
    with pytest.raises(ConfigError, match="--allowed-origins"):
        FrontendConfig(allowed_origins=(origin,))


# ---- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pair"), [("[", "]"), ('{"a":', "}")])
def test_nesting_is_bounded(lab, pair):
    async def scenario():
        async with lab.serving() as server:
            for depth in (MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1, 100_000):
                value = pair[0] * depth + "1" + pair[1] * depth
                body = f'{{"x": {value}}}'.encode()
                response = await server.http.post("/v1/chat/completions", content=body)
                message = response.json()["error"]["message"]
                assert response.status_code == 400
                assert f"{depth + 1} levels deep; allowed: {MAX_JSON_DEPTH}" in message

            inside = {"model": "m", "messages": [{"role": "user", "content": "[{" * 500}], "x": 1}
            response = await server.http.post("/v1/chat/completions", json=inside)
            assert response.json()["error"]["code"] == "unknown_field"
            cut = b"[" * 100_000
            assert (await server.http.post("/v1/completions", content=cut)).status_code == 400

    lab.run(scenario)


def test_numbers_of_things_are_bounded(lab):
    async def scenario():
        async with lab.serving() as server:
            message = {"role": "user", "content": "x"}
            tool = {"type": "function", "function": {"name": "f"}}
            for name, fields in (
                ("messages", {"messages": [message] * 20_000}),
                ("tools", {"tools": [tool] * 2000}),
                ("stop", {"stop": ["a"] * 17}),
                ("logit_bias", {"logit_bias": {str(i): 1 for i in range(1025)}}),
            ):
                response = await server.chat(**fields)
                assert response.status_code == 400
                assert response.json()["error"]["param"] == name
            for name, fields in (
                ("input", {"input": [message] * 20_000}),
                ("tools", {"input": "x", "tools": [{"type": "function", "name": "f"}] * 2000}),
            ):
                post = server.http.post("/v1/responses", json={"model": "m", **fields})
                assert (await post).json()["error"]["param"] == name
            many = b'{"model": "m", "prompt": [' + b"1," * 2_000_001 + b"1]}"
            response = await server.http.post("/v1/completions", content=many)
            assert "values; allowed" in _error(response, 400, "invalid_json")

    lab.run(scenario)


def test_packed_bodies_are_refused(lab):
    async def scenario():
        async with lab.serving() as server:
            for coding, status in (("gzip", 415), ("identity", 400)):
                headers = {"content-encoding": coding}
                post = server.http.post("/v1/completions", content=b"{}", headers=headers)
                assert (await post).status_code == status

    lab.run(scenario)


# ---- time-outs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_take_too_long_are_ended(lab, stream):
    async def scenario():
        slow = lab.line(lab.content("abcdefgh" * 100), delay_ms=20)
        async with lab.serving(slow, config=FrontendConfig(request_timeout_s=30)) as server:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream}
            headers = {"x-request-timeout": "0.1"}
            response = await server.http.post("/v1/chat/completions", json=body, headers=headers)
            if stream:
                assert response.status_code == 200
                error = json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["error"]
                assert error["code"] == "request_timeout"
            else:
                assert "0.1 s" in _error(response, 504, "request_timeout")
            assert len(server.engine.aborted) == 1
            for header in ("soon", "-1", "nan", "1e9"):
                headers = {"x-request-timeout": header}
                post = server.http.post("/v1/chat/completions", json=body, headers=headers)
                assert (await post).status_code == 400

    lab.run(scenario)


# ---- logs --------------------------------------------------------------------------------------------------


def test_logs_have_the_requests_id_and_nothing_that_was_said(lab, caplog):
    secret = "sesame"

    def fail(conversation):
        raise ValueError(f"cannot read {conversation}")

    async def scenario():
        line = lab.line([*lab.reasoning(secret), *lab.content(secret), lab.END])
        async with lab.serving(line) as server:
            messages = [{"role": "user", "content": secret}]
            headers = {"x-request-id": "mine-1", "authorization": f"Bearer {secret}"}
            post = server.http.post
            path = "/v1/chat/completions"
            for body in ({"messages": messages}, {"messages": messages, secret: 1}, {"model": 1}):
                await post(path, json={"model": "m", **body}, headers=headers)
            await post(path, content=secret.encode(), headers=headers)
            await post(path + "?" + secret, json={}, headers=headers)
            server.formatter.encode = fail
            assert (await server.chat(messages=messages)).status_code == 500
            await server.http.get("/health")

    with caplog.at_level(logging.DEBUG, "rose"):
        logging.getLogger("rose").propagate = True
        lab.run(scenario)
    said = "\n".join(record.getMessage() + str(record.exc_info) for record in caplog.records)
    assert "mine-1 POST /v1/chat/completions: 200 in" in said
    assert "mine-1 POST /v1/chat/completions: 400 in" in said
    assert "ValueError" in said
    assert "in fail" in said
    assert "/health" not in said
    assert secret not in said
