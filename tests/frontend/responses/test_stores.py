"""The stores of responses: limits in number, bytes and time, and what several processes share in a file."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sqlite3
import stat

import pytest

from rose.frontend.config import FrontendConfig
from rose.frontend.responses import background
from rose.frontend.responses.file_store import FileStore
from rose.frontend.responses.store import Limits, MemoryStore, Record, StoreError
from rose.utils.errors import ConfigError

ANSWER = "<|channel|>final<|message|>Four.<|return|>"
LONG = "<|channel|>final<|message|>" + "word " * 400


def record(name, size=100):
    return Record(
        id=name,
        status="completed",
        body=json.dumps("x" * size).encode(),
        history=[],
        output=[],
        sampled={0: [1, 2]},
    )


@pytest.fixture(params=["memory", "file"])
def make_store(request, tmp_path):
    """Return a function that makes a store of each kind."""

    def make_store(clock, **limits):
        whole = Limits(**{"num_records": 3, "num_bytes": 10**6, "seconds": 60.0} | limits)
        if request.param == "memory":
            return MemoryStore(whole, clock=clock)
        return FileStore(str(tmp_path / "responses"), whole, clock=clock)

    return make_store


def test_the_longest_unused_record_makes_room(make_store):
    ticks = itertools.count()
    store = make_store(lambda: next(ticks) / 10)
    for name in "abc":
        store.put(record(name))
    assert store.get("a").sampled == {0: [1, 2]}
    store.put(record("d"))
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]
    assert store.num_records() == 3


def test_the_store_stays_within_its_bytes(make_store):
    store = make_store(lambda: 0.0, num_bytes=3000)
    for name in "abc":
        store.put(record(name, 1000))
        assert store.num_bytes() <= 3000
    assert store.get("a") is None
    store.put(record("huge", 4000))
    assert (store.num_records(), store.num_bytes()) == (0, 0)
    store.put(record("a", 1000))
    store.put(record("a", 10))
    assert store.num_records() == 1
    assert store.num_bytes() < 500


def test_records_are_forgotten_after_their_time_unless_they_are_used(make_store):
    now = [0.0]
    store = make_store(lambda: now[0])
    store.put(record("a"))
    store.put(record("b"))
    now[0] = 50.0
    assert store.get("a")
    now[0] = 70.0
    assert store.get("b") is None
    assert store.get("a")
    assert store.num_records() == 1
    now[0] = 131.0
    assert not store.delete("a")
    assert store.num_bytes() == 0


# ---- files -------------------------------------------------------------------------------------------------


def test_a_file_is_private_and_of_one_layout(tmp_path):
    path = tmp_path / "responses"
    limits = Limits(num_records=3, num_bytes=10**6, seconds=60.0)
    FileStore(str(path), limits).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    store = FileStore(str(path), limits)
    store._file.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(ConfigError, match="layout 99"):
        FileStore(str(path), limits)
    path.write_text("no database at all, but some text that is long enough to be looked at " * 20)
    with pytest.raises(ConfigError, match="cannot be opened"):
        FileStore(str(path), limits)
    with pytest.raises(ConfigError, match="cannot be opened"):
        FileStore(str(tmp_path / "none" / "responses"), limits)


def test_events_count_and_go_with_their_record(tmp_path):
    limits = Limits(num_records=3, num_bytes=3000, seconds=60.0)
    store = FileStore(str(tmp_path / "responses"), limits)
    store.put(record("a"))
    store.add_events("a", 0, [b"x" * 1000, b"y" * 1000])
    assert store.events("a", 1) == [b"y" * 1000]
    assert store.num_bytes() > 2000
    store.put(record("b", 1000))
    assert (store.get("a"), store.events("a", 0)) == (None, [])
    assert store.delete("b")
    assert store.num_bytes() == 0


def test_events_of_a_record_that_made_room_are_not_kept_any_more(tmp_path):
    limits = Limits(num_records=3, num_bytes=3000, seconds=60.0)
    store = FileStore(str(tmp_path / "responses"), limits)
    store.put(record("a"))
    store.add_events("a", 0, [b"x" * 2000])
    store.put(record("b", 1000))
    assert store.get("a") is None
    size = store.num_bytes()
    store.add_events("a", 1, [b"y" * 2000])  # its response still runs
    store.put(record("a"))
    store.add_events("a", 2, [b"z" * 2000])
    assert store.events("a", 0) == [], "a gap would be read as if it were the beginning"
    assert store.num_bytes() < size + 1000
    with contextlib.closing(sqlite3.connect(tmp_path / "responses")) as file:
        assert file.execute("SELECT count(*) FROM events").fetchone() == (0,)


def test_a_file_that_cannot_be_used_says_so_whatever_is_asked(tmp_path):
    path = tmp_path / "responses"
    store = FileStore(str(path), Limits(num_records=3, num_bytes=3000, seconds=60.0))
    store.put(record("a"))
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.executescript("DROP TABLE records; DROP TABLE events")
    for use in (
        lambda: store.get("a"),
        lambda: store.put(record("b")),
        lambda: store.events("a", 0),
        store.num_records,
        store.num_bytes,
    ):
        with pytest.raises(StoreError, match="cannot be used: no such table"):
            use()


def test_a_store_that_fails_is_no_bug_of_the_server(talk, tmp_path):
    path = tmp_path / "responses"

    async def scenario(room):
        body = await room.create()
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.executescript("DROP TABLE records")
        found = await room.http.get(f"/v1/responses/{body['id']}")
        assert found.status_code == 503
        assert "retry-after" in found.headers
        next_turn = await room.create(status=503, previous_response_id=body["id"])
        for answer in (found.json(), next_turn):
            assert answer["error"]["code"] == "store_unavailable"
        metrics = await room.http.get("/metrics")
        assert metrics.status_code == 200
        assert "rose_responses_in_background" in metrics.text
        assert "rose_responses_stored " not in metrics.text
        assert (await room.create())["store"] is False  # answered all the same, and it says so

    talk(scenario, ANSWER, config={"response_store": str(path)})


@pytest.fixture
def two(lab, harmony, o200k, tmp_path, monkeypatch):
    """Return a function that runs a scenario with two frontends that share a file."""
    monkeypatch.setattr(background, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(background, "POLL_SECONDS", 0.01)
    path = tmp_path / "responses"
    config = FrontendConfig(
        conversation_date="none", response_store=str(path), shutdown_timeout_s=0.05
    )

    def two(scenario, text, **fields):
        line = lab.line(o200k.encode_with_control(text), **fields)

        async def run():
            async with contextlib.AsyncExitStack() as stack:
                servers = [
                    await stack.enter_async_context(
                        lab.serving(line, formatter=harmony, config=config)
                    )
                    for _ in range(2)
                ]
                await scenario(*(server.http for server in servers))

        lab.run(run)

    return two


async def create(http, **body):
    response = await http.post("/v1/responses", json={"model": "m", "input": "Hi", **body})
    assert response.status_code == 200, response.text
    return response


def test_a_turn_goes_on_at_another_frontend(two):
    async def scenario(one, other):
        first = (await create(one)).json()
        second = (await create(other, previous_response_id=first["id"])).json()
        assert (await one.get(f"/v1/responses/{second['id']}")).json() == second
        await other.delete(f"/v1/responses/{first['id']}")
        assert (await one.get(f"/v1/responses/{first['id']}")).status_code == 404

    two(scenario, ANSWER)


def test_a_response_is_followed_and_cancelled_from_another_frontend(two):
    async def scenario(one, other):
        url = f"/v1/responses/{(await create(one, background=True)).json()['id']}"
        while (await other.get(url)).json()["status"] != "in_progress":
            await asyncio.sleep(0.01)
        follower = asyncio.create_task(other.get(url, params={"stream": "true"}))
        await asyncio.sleep(0.1)
        cancelled = (await other.post(f"{url}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert (await one.get(url)).json() == cancelled
        events = (await follower).text
        assert "response.created" in events
        assert events == (await one.get(url, params={"stream": "true"})).text

    two(scenario, LONG, delay_ms=2)


def test_a_response_whose_frontend_is_gone_has_failed(two, monkeypatch):
    async def scenario(one, other):
        url = f"/v1/responses/{(await create(one, background=True)).json()['id']}"
        assert (await other.get(url)).json()["status"] in ("queued", "in_progress")
        monkeypatch.setattr(background, "LOST_SECONDS", -1.0)
        lost = (await other.get(url)).json()
        assert lost["status"] == "failed"
        assert "has ended" in lost["error"]["message"]

    two(scenario, LONG, delay_ms=2)


def test_a_server_that_hides_reasoning_hides_what_was_kept_before(talk, tmp_path):
    text = ANSWER.replace(
        "<|channel|>", "<|channel|>analysis<|message|>Secret.<|end|><|start|>assistant<|channel|>"
    )
    config = {"response_store": str(tmp_path / "responses")}
    made = []

    async def show(room):
        for options in ({}, {"reasoning_mode": "debug"}):
            made.append((await room.create(**options))["id"])
        events = await room.create(background=True, stream=True)
        assert "Secret." in json.dumps(events)
        made.append(events[0]["response"]["id"])
        body = await room.create(previous_response_id=made[0], input="More")
        made.append(body["id"])

    async def hide(room):
        for response_id in made:
            seen = [await room.get(response_id)]
            seen.append(await room.get(f"{response_id}/input_items"))
            include = {"include[]": "reasoning.encrypted_content"}
            seen.append(await room.get(response_id, **include))
            assert "Secret." not in json.dumps(seen)
            await room.get(response_id, status=400, stream="true")
        await room.create(previous_response_id=made[0], input="More")

    talk(show, text, config=config)
    talk(hide, text, config={**config, "reasoning": "hidden"})


def test_a_store_that_fails_costs_the_record_and_not_the_answer(talk, tmp_path):
    async def scenario(room):
        store = room.http._transport.app.router.routes
        route = next(r for r in store if r.path == "/v1/responses")
        file = route.endpoint.__self__._store._file
        file.execute("DROP TABLE records")
        body = await room.create()
        assert body["status"] == "completed"
        assert body["store"] is False
        events = await room.create(stream=True)
        assert events[-1]["response"]["store"] is False

    talk(scenario, ANSWER, config={"response_store": str(tmp_path / "responses")})


def test_metrics_tell_what_is_kept(talk):
    async def scenario(room):
        await room.create()
        text = (await room.http.get("/metrics")).text
        assert "\nrose_responses_stored 1.0\n" in text
        assert "\nrose_responses_in_background 0.0\n" in text
        [line] = [row for row in text.splitlines() if row.startswith("rose_responses_stored_bytes")]
        assert float(line.split()[1]) > 500

    talk(scenario, ANSWER)


@pytest.mark.parametrize("name", ["response_store_count", "response_store_bytes"])
def test_limits_of_nothing_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0"):
        FrontendConfig(**{name: 0})


def test_a_closed_store_is_not_asked_for_its_sizes(lab, tmp_path, caplog):
    """Several frontends publish their counts until all of them have ended."""

    async def scenario():
        config = FrontendConfig(conversation_date="none", response_store=str(tmp_path / "store"))
        async with lab.serving(config=config) as server:
            before = {family.name for family in server.metrics.own_families()}
        after = {family.name for family in server.metrics.own_families()}
        assert before - after == {
            "rose_responses_stored",
            "rose_responses_stored_bytes",
            "rose_responses_in_background",
        }

    with caplog.at_level(logging.ERROR):
        lab.run(scenario)
    assert not caplog.records
