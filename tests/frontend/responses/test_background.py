"""Responses in the background: polled, followed, resumed, cancelled, cut off by the server's end."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from rose.frontend.metrics import Metrics
from rose.frontend.responses.background import Background
from rose.frontend.responses.store import Limits, NoStore

ANSWER = (
    "<|channel|>analysis<|message|>Easy sum.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The sum is 4.<|return|>"
)
LONG = "<|channel|>final<|message|>" + "word " * 400
PATIENCE_SECONDS = 5


async def until(poll, *states):
    """Ask until a response is in one of some states; return it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (body := await poll())["status"] not in states:
            await asyncio.sleep(0.005)
    return body


async def begun(room):
    """Start a long response and wait until it writes; return its id."""
    body = await room.create(background=True)
    assert body["status"] in ("queued", "in_progress")
    assert body["output"] == []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await room.get(body["id"]))["output"]:
            await asyncio.sleep(0.005)
    return body["id"]


def stored(app, response_id):
    """Return the record of a response in an application's store."""
    route = next(r for r in app.router.routes if r.path == "/v1/responses")
    return route.endpoint.__self__._store.get(response_id)


async def aborted(room):
    """Wait until the engine was told to stop, which nobody waits for, and only once."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not room.server.engine.aborted:
            await asyncio.sleep(0.001)
    assert len(room.server.engine.aborted) == 1


def test_a_response_is_made_while_nobody_waits(talk):
    async def scenario(room):
        body = await room.create(background=True, metadata={"a": "b"})
        done = await until(lambda: room.get(body["id"]), "completed")
        assert done["background"] is True
        assert [item["type"] for item in done["output"]] == ["reasoning", "message"]
        assert done["usage"]["output_tokens"] > 0
        follow = await room.create(previous_response_id=body["id"], input="More")
        assert follow["status"] == "completed"
        assert "The sum is 4." in room.prompt_text()

    talk(scenario, ANSWER)


def test_its_stream_can_be_read_again_from_any_event(talk):
    async def scenario(room):
        events = await room.create(background=True, stream=True)
        kinds = [e["type"].removeprefix("response.") for e in events]
        assert kinds[:3] == ["created", "queued", "in_progress"]
        assert kinds[-1] == "completed"
        assert [e["response"]["status"] for e in events[:3]] == ["queued", "queued", "in_progress"]
        response_id = events[0]["response"]["id"]
        assert await room.get(response_id, stream="true") == events
        for last in (0, 5, len(events) - 2):
            rest = await room.get(response_id, stream="true", starting_after=last)
            assert rest == events[last + 1 :]
        assert await room.get(response_id, stream="true", starting_after=len(events)) == []
        assert (await room.get(response_id)) == events[-1]["response"]

    talk(scenario, ANSWER)


def test_a_stream_is_followed_while_it_runs_and_outlives_its_readers(talk, line):
    async def scenario(room):
        response_id = await begun(room)
        reader = asyncio.create_task(room.get(response_id, stream="true"))
        await asyncio.sleep(0.02)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
        assert (await room.get(response_id))["status"] == "in_progress"
        assert stored(room.http._transport.app, response_id).status == "in_progress"
        two = [room.get(response_id, stream="true") for _ in range(2)]
        first, second = await asyncio.gather(*two)
        assert first == second
        assert first[-1]["type"] == "response.completed"
        text = "".join(e["delta"] for e in first if e["type"].endswith("output_text.delta"))
        assert text == "word " * 400
        assert room.server.engine.aborted == []

    talk(scenario, line(LONG, delay_ms=1))


def test_cancel_stops_the_engine_and_keeps_what_was_written(talk, line):
    async def scenario(room):
        response_id = await begun(room)
        follower = asyncio.create_task(room.get(response_id, stream="true"))
        body = await room.post(f"{response_id}/cancel")
        assert body["status"] == "cancelled"
        assert body["output"][0]["status"] == "incomplete"
        assert body["output"][0]["content"][0]["text"].startswith("word")
        await aborted(room)
        assert await room.post(f"{response_id}/cancel") == body, "again changes nothing"
        assert await room.get(response_id) == body
        assert (await follower)[-1]["type"].endswith(".delta")
        error = (await room.create(status=400, previous_response_id=response_id))["error"]
        assert "is cancelled" in error["message"]

    talk(scenario, line(LONG, delay_ms=1))


def test_cancel_before_the_first_step(talk, line):
    async def scenario(room):
        body = await room.create(background=True)
        cancelled = await room.post(f"{body['id']}/cancel")
        assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])

    talk(scenario, line(LONG, delay_ms=1000))


def test_cancel_of_what_has_ended_or_never_ran_so(talk):
    async def scenario(room):
        foreground = await room.create()
        error = (await room.post(f"{foreground['id']}/cancel", status=400))["error"]
        assert "background=true" in error["message"]
        await room.post("resp_x/cancel", status=404)
        body = await room.create(background=True)
        done = await until(lambda: room.get(body["id"]), "completed")
        assert await room.post(f"{body['id']}/cancel") == done

    talk(scenario, ANSWER)


def test_delete_cancels(talk, line):
    async def scenario(room):
        response_id = await begun(room)
        assert (await room.http.delete(f"/v1/responses/{response_id}")).status_code == 200
        await aborted(room)
        await room.get(response_id, status=404)
        await room.get(response_id, status=404, stream="true")

    talk(scenario, line(LONG, delay_ms=1))


def test_a_failure_is_told_when_it_is_asked_for(talk, line):
    async def scenario(room):
        for text in ("<|channel|>final<|message|>one", ""):
            body = await room.create(background=True)
            failed = await until(lambda body=body: room.get(body["id"]), "failed")
            assert failed["error"]["message"] == "device lost"
            assert bool(failed["output"]) is bool(text)
            events = await room.get(body["id"], stream="true")
            assert events[-1]["type"] == "response.failed"

    talk(
        scenario,
        line("<|channel|>final<|message|>one", error="device lost"),
        line("", error="device lost"),
    )


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_response_may_take_no_longer_than_an_answer(talk, line, is_asked):
    async def scenario(room):
        if is_asked:
            room.http.headers["x-request-timeout"] = "0.05"
        body = await room.create(background=True)
        failed = await until(lambda: room.get(body["id"]), "failed")
        assert "within 0.05 s" in failed["error"]["message"]
        await aborted(room)

    talk(scenario, line(LONG, delay_ms=5), config={"request_timeout_s": 30 if is_asked else 0.05})


def test_a_full_queue_is_told_as_such(talk, line):
    from rose.server.scripted import ScriptError

    async def scenario(room):
        body = await room.create(background=True)
        failed = await until(lambda: room.get(body["id"]), "failed")
        assert failed["error"] == {"code": "rate_limit_exceeded", "message": "256 wait"}

    talk(scenario, line("", error=ScriptError(code="queue_full", message="256 wait")))


def test_a_server_that_ends_waits_and_then_keeps_them_as_failed(talk, line):
    seen = {}

    async def scenario(room):
        seen["id"] = await begun(room)
        seen["app"] = room.http._transport.app

    config = {"shutdown_timeout_s": 0.05}
    talk(scenario, line(LONG, delay_ms=20), config=config)
    record = stored(seen["app"], seen["id"])
    assert record.status == "failed"
    assert b"shutting down" in bytes(record.body)


def test_events_of_foreground_responses_are_not_kept(talk):
    async def scenario(room):
        body = await room.create()
        error = (await room.get(body["id"], status=400, stream="true"))["error"]
        assert error["param"] == "stream"
        for query in ({"stream": "maybe"}, {"starting_after": 3}, {"include": "all"}):
            error = (await room.get(body["id"], status=400, **query))["error"]
            assert error["param"].startswith(next(iter(query)))

    talk(scenario, ANSWER)


@pytest.mark.parametrize("limits", [{"num_records": 2}, {"num_bytes": 20_000}])
def test_kept_events_stay_within_the_limits(talk, monkeypatch, limits):
    made = []
    init = Background.__init__

    def remember(self, store, given, *rest, **options):
        whole = {"num_records": 100, "num_bytes": 10**9, "seconds": 60.0} | limits
        init(self, store, Limits(**whole), *rest, **options)
        made.append(self)

    monkeypatch.setattr(Background, "__init__", remember)

    async def scenario(room):
        ids = []
        for _ in range(4):
            events = await room.create(background=True, stream=True)
            ids.append(events[0]["response"]["id"])
        await asyncio.sleep(0)
        kept = [response_id for response_id in ids if response_id in made[0]._logs]
        assert kept == ids[-len(kept) :]
        assert 0 < len(kept) < 4
        if "num_bytes" in limits:
            assert sum(made[0]._logs[i].num_bytes for i in kept) <= limits["num_bytes"]

    talk(scenario, ANSWER)


def test_a_response_may_be_forgotten_while_it_is_cancelled():
    body = SimpleNamespace(id="r", status="queued")
    turn = SimpleNamespace(
        body=body,
        keep=lambda: None,
        created=list,
        cancelled=lambda: setattr(body, "status", "cancelled"),
    )

    async def scenario():
        background = Background(
            NoStore(), Limits(num_records=3, num_bytes=3000, seconds=60.0), Metrics()
        )
        log = background.start(turn)
        cancel = asyncio.create_task(background.cancel(SimpleNamespace(id="r", status="queued")))
        background._tasks["r"].add_done_callback(lambda _: background.forget("r"))
        await cancel
        assert body.status == "cancelled"
        assert log.is_closed

    asyncio.run(asyncio.wait_for(scenario(), 10))
