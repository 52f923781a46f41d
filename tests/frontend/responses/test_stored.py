"""Responses that are kept: next turns, their tokens, GET, DELETE, input items, limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "data" / "handed.jsonl"
TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
CALL = (
    "<|channel|>analysis<|message|>Use it.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city":"Oslo"}<|call|>'
)
ANSWER = (
    "<|channel|>analysis<|message|>Cold.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Three degrees.<|return|>"
)


def output_of(body, text='{"t":3}'):
    call = next(item for item in body["output"] if item["type"] == "function_call")
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": text}]


def test_a_tool_loop_goes_on_from_the_very_tokens_that_were_sampled(talk, o200k):
    sampled = o200k.encode_with_control(CALL)

    async def scenario(room):
        first = await room.create(input="Weather in Oslo?", tools=TOOLS)
        await room.create(
            previous_response_id=first["id"], input=output_of(first), tools=TOOLS, stream=True
        )
        before, after = room.prompt(0), room.prompt(1)
        expected = [*before, *sampled]
        assert after[: len(expected)] == expected, "the prefix cache finds the whole first turn"
        assert room.prompt_text().endswith(
            "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
            '{"t":3}<|end|><|start|>assistant'
        )

    talk(scenario, CALL, ANSWER)


def test_the_case_of_a_stored_call_and_its_result(talk):
    case = next(
        c for c in map(json.loads, DATA.open()) if c["id"] == "render-previous-response-tool"
    )
    turn, request = case["input"]["stored_turn"], case["input"]["request"]
    [call] = turn["output"]
    text = (
        f"<|channel|>commentary to=functions.{call['name']} <|constrain|>json<|message|>"
        f"{call['arguments']}<|call|>"
    )

    async def scenario(room):
        first = await room.create(input=turn["input"], tools=TOOLS)
        assert [item["name"] for item in first["output"]] == [call["name"]]
        result = {**request["input"][0], "call_id": first["output"][0]["call_id"]}
        await room.create(previous_response_id=first["id"], input=[result], tools=TOOLS)
        prompt, place = room.prompt_text(), 0
        for part in case["expected"]["contains_in_order"]:
            place = prompt.index(part, place) + len(part)

    talk(scenario, text, ANSWER)


def test_a_loop_of_two_calls_keeps_its_prefix_and_its_reasoning(talk, o200k):
    sampled = o200k.encode_with_control(CALL)

    async def scenario(room):
        body = None
        for _ in range(3):
            previous = {"previous_response_id": body["id"]} if body else {}
            body = await room.create(
                input=output_of(body) if body else "Hi", tools=TOOLS, **previous
            )
        first, second, third = (room.prompt(i) for i in range(3))
        assert second[: len(first) + len(sampled)] == [*first, *sampled]
        assert third[: len(second) + len(sampled)] == [*second, *sampled]
        assert room.prompt_text().count("Use it.") == 2

    talk(scenario, CALL)


def test_after_a_final_answer_the_reasoning_is_gone_and_the_call_stays(talk):
    async def scenario(room):
        first = await room.create(tools=TOOLS)
        second = await room.create(
            previous_response_id=first["id"], input=output_of(first), tools=TOOLS
        )
        await room.create(previous_response_id=second["id"], input="And Rome?", tools=TOOLS)
        text = room.prompt_text()
        assert "Use it." not in text
        assert "Cold." not in text
        assert '{"city":"Oslo"}<|call|>' in text
        assert "<|channel|>final<|message|>Three degrees.<|end|>" in text
        assert text.endswith("<|start|>user<|message|>And Rome?<|end|><|start|>assistant")

    talk(scenario, CALL, ANSWER)


@pytest.mark.parametrize("mode", ["visible", "hidden"])
def test_a_client_that_sends_the_items_itself_gets_the_same_prompt(talk, mode):
    async def scenario(room):
        first = await room.create(tools=TOOLS, reasoning_mode=mode)
        items = [{"role": "user", "content": "Hi"}, *first["output"], *output_of(first)]
        second = await room.create(input=items, tools=TOOLS, reasoning_mode=mode)
        by_items = room.prompt()
        await room.create(previous_response_id=first["id"], input=output_of(first), tools=TOOLS)
        assert by_items == room.prompt()
        shown = json.dumps(await room.get(f"{second['id']}/input_items"))
        assert ("Use it." in shown) is (mode == "visible")

    talk(scenario, CALL, ANSWER, ANSWER)


def test_items_that_the_client_changed_are_read_as_it_sent_them(talk):
    async def scenario(room):
        first = await room.create(tools=TOOLS)
        reasoning, call = first["output"]
        reasoning["content"][0]["text"] = "Other."
        call["arguments"] = '{"city":"Rome"}'
        items = [{"role": "user", "content": "Hi"}, reasoning, call, *output_of(first)]
        await room.create(input=items, tools=TOOLS)
        text = room.prompt_text()
        assert "<|channel|>analysis<|message|>Other.<|end|>" in text
        assert "Rome" in text
        assert "Oslo" not in text

    talk(scenario, CALL, ANSWER)


def test_without_a_store_items_are_rendered_from_their_text(talk):
    async def scenario(room):
        first = await room.create(tools=TOOLS, store=False)
        items = [{"role": "user", "content": "Hi"}, *first["output"], *output_of(first)]
        await room.create(input=items, tools=TOOLS, store=False)
        text = room.prompt_text()
        assert "<|channel|>analysis<|message|>Use it.<|end|>" in text
        assert "<|start|>assistant to=functions.get_weather<|channel|>commentary" in text

    talk(scenario, CALL, ANSWER)


def test_what_was_not_well_formed_is_rendered_from_its_text(talk):
    odd = CALL.replace("<|start|>assistant<|channel|>commentary", "<|channel|>commentary")

    async def scenario(room):
        first = await room.create(tools=TOOLS)
        await room.create(previous_response_id=first["id"], input=output_of(first), tools=TOOLS)
        assert "<|start|>assistant to=functions.get_weather<|channel|>" in room.prompt_text()

    talk(scenario, odd, ANSWER)


def test_references_bring_the_items_they_name(talk):
    async def scenario(room):
        first = await room.create(tools=TOOLS, input=[{"role": "user", "content": "Oslo?"}])
        listed = (await room.get(f"{first['id']}/input_items"))["data"]
        items = [
            {"type": "item_reference", "id": listed[0]["id"]},
            {"id": first["output"][0]["id"]},
            {"type": "item_reference", "id": first["output"][1]["id"]},
            *output_of(first),
        ]
        await room.create(input=items, tools=TOOLS)
        by_reference = room.prompt()
        await room.create(previous_response_id=first["id"], input=output_of(first), tools=TOOLS)
        assert by_reference == room.prompt()
        for wrong in ("rs_" + 32 * "0" + "_0", "x", first["output"][0]["id"] + "9"):
            items = [{"type": "item_reference", "id": wrong}]
            error = (await room.create(status=400, input=items))["error"]
            assert (error["code"], error["param"]) == ("item_not_found", "input[0].id")

    talk(scenario, CALL, ANSWER, ANSWER)


def test_get_returns_what_create_did_until_it_is_deleted(talk):
    async def scenario(room):
        body = await room.create(metadata={"a": "b"})
        assert await room.get(body["id"]) == body
        response = await room.http.delete(f"/v1/responses/{body['id']}")
        assert response.json() == {"id": body["id"], "object": "response", "deleted": True}
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            gone = await room.http.request(method, f"/v1/responses/{body['id']}{path}")
            assert gone.status_code == 404
            assert gone.json()["error"]["code"] == "response_not_found"
        error = (await room.create(status=400, previous_response_id=body["id"]))["error"]
        assert error["code"] == "previous_response_not_found"

    talk(scenario, ANSWER)


def test_a_later_turn_outlives_the_one_before(talk):
    async def scenario(room):
        first = await room.create(input="Question one")
        second = await room.create(previous_response_id=first["id"], input="Question two")
        await room.http.delete(f"/v1/responses/{first['id']}")
        await room.create(previous_response_id=second["id"], input="Question three")
        assert "Question one" in room.prompt_text()

    talk(scenario, ANSWER)


def test_store_false_keeps_nothing(talk):
    async def scenario(room):
        body = await room.create(store=False)
        assert body["store"] is False
        await room.get(body["id"], status=404)

    talk(scenario, ANSWER)


def test_a_response_is_found_with_its_own_key_only(talk):
    def with_key(key):
        return {"headers": {"authorization": f"Bearer {key}"}}

    async def scenario(room):
        asked = {"model": "m", "input": "Secret question", "background": True}
        made = await room.http.post("/v1/responses", json=asked, **with_key("one"))
        url = f"/v1/responses/{made.json()['id']}"
        item = f"msg_{made.json()['id'].removeprefix('resp_')}_i0"
        for method, path in (
            *(("GET", url), ("GET", f"{url}?stream=true"), ("GET", f"{url}/input_items")),
            *(("POST", f"{url}/cancel"), ("DELETE", url)),
        ):
            response = await room.http.request(method, path, **with_key("two"))
            assert (response.status_code, response.json()["error"]["code"]) == (
                404,
                "response_not_found",
            )
        for body in (
            {"model": "m", "input": "Go on", "previous_response_id": made.json()["id"]},
            {"model": "m", "input": [{"type": "item_reference", "id": item}]},
        ):
            for path in ("/v1/responses", "/v1/responses/input_tokens"):
                refused = await room.http.post(path, json=body, **with_key("two"))
                assert refused.status_code == 400
                assert refused.json()["error"]["code"].endswith("_not_found")
        echo = [{"role": "user", "content": "x", "id": item}]
        await room.http.post("/v1/responses", json={"model": "m", "input": echo}, **with_key("two"))
        assert "Secret" not in room.prompt_text()
        assert (await room.http.get(url, **with_key("one"))).status_code == 200

    talk(scenario, ANSWER, config={"api_key": ("one", "two")})


def test_a_server_without_a_store_says_so(talk):
    async def scenario(room):
        body = await room.create()
        assert body["store"] is False
        await room.get(body["id"], status=404)
        for field in ("store", "background"):
            error = (await room.create(status=400, **{field: True}))["error"]
            assert (error["code"], error["param"]) == ("unsupported_value", field)

    talk(scenario, ANSWER, config={"response_store": "none"})


def test_input_items_are_all_that_the_answer_was_made_of(talk):
    async def scenario(room):
        first = await room.create(input="Hi", tools=TOOLS)
        second = await room.create(
            previous_response_id=first["id"], input=output_of(first), tools=TOOLS
        )
        path = f"{second['id']}/input_items"
        page = await room.get(path, order="asc")
        kinds = [item["type"] for item in page["data"]]
        assert kinds == ["message", "reasoning", "function_call", "function_call_output"]
        assert page["data"][1]["content"] == first["output"][0]["content"]
        assert page["has_more"] is False
        newest = await room.get(path)
        assert newest["data"] == page["data"][::-1]
        small = await room.get(path, limit=3)
        assert (small["has_more"], len(small["data"])) == (True, 3)
        rest = await room.get(path, after=small["last_id"], limit=3)
        assert small["data"] + rest["data"] == newest["data"]
        for query in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
            error = (await room.get(path, status=400, **query))["error"]
            assert error["param"] == next(iter(query))

    talk(scenario, CALL, ANSWER)


def test_every_form_of_item_is_kept_in_openais_own(talk):
    """The lab checks each answer against OpenAI's schemas, so listing them is the test."""
    output_text = {"type": "output_text", "text": "c", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
    items = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "c", "id": "mine"},
        {"role": "assistant", "content": "c", "phase": "commentary"},
        {"role": "assistant", "content": [output_text], "status": "incomplete", "phase": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "d"}], "id": None},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        call,
        {**call, "call_id": "c2", "namespace": "crm", "id": "fc_1", "status": "in_progress"},
        {"type": "function_call_output", "call_id": "c1", "output": "e"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "f"}],
        },
    ]

    async def scenario(room):
        body = await room.create(input=items)
        page = await room.get(f"{body['id']}/input_items", order="asc")
        assert [item["type"] for item in page["data"]] == [
            item.get("type", "message") for item in items
        ]
        assert len({item["id"] for item in page["data"]}) == len(items)
        await room.create(input=page["data"])
        assert room.prompt(0) == room.prompt(1), "what is listed can be sent again"

    talk(scenario, ANSWER)


def test_sealed_reasoning_carries_a_loop_without_a_store(talk):
    include = ["reasoning.encrypted_content"]

    async def scenario(room):
        first = await room.create(
            tools=TOOLS, store=False, include=include, reasoning_mode="hidden"
        )
        sealed = first["output"][0]
        assert "content" not in sealed or sealed["content"] == []
        items = [{"role": "user", "content": "Hi"}, *first["output"], *output_of(first)]
        second = await room.create(input=items, tools=TOOLS, include=include)
        assert "<|channel|>analysis<|message|>Use it.<|end|>" in room.prompt_text()
        shown = json.dumps(await room.get(f"{second['id']}/input_items"))
        assert "Use it." not in shown
        broken = {**sealed, "encrypted_content": sealed["encrypted_content"][:-8] + "AAAAAAA="}
        for wrong in (broken, {**sealed, "encrypted_content": "gAAAA é"}):
            error = (await room.create(status=400, input=[wrong]))["error"]
            assert error["code"] == "invalid_encrypted_content"
            assert error["param"] == "input[0].encrypted_content"
        later = await room.get(second["id"], **{"include[]": include[0]})
        assert later["output"][0]["encrypted_content"].startswith("rose1.")

    talk(scenario, CALL, ANSWER)


def test_a_key_file_opens_what_another_process_sealed(talk, tmp_path):
    key = tmp_path / "key"
    key.write_text("k" * 32)
    config = {"responses_key_file": str(key)}
    made = []

    async def seal(room):
        body = await room.create(include=["reasoning.encrypted_content"])
        made.append({**body["output"][0], "content": []})

    async def unseal(room):
        await room.create(input=[{"role": "user", "content": "Hi"}, *made])
        assert "Cold." in room.prompt_text()

    async def fail(room):
        await room.create(status=400, input=made)

    talk(seal, ANSWER, config=config)
    talk(unseal, ANSWER, config=config)
    talk(fail, ANSWER)
    from rose.utils.errors import ConfigError

    key.write_text("short")
    with pytest.raises(ConfigError, match="5 bytes; allowed: 32 or more"):
        talk(fail, ANSWER, config=config)
    with pytest.raises(ConfigError, match="cannot be read"):
        talk(fail, ANSWER, config={"responses_key_file": str(tmp_path / "none")})


def test_the_server_keeps_within_its_limits(talk):
    async def scenario(room):
        bodies = [await room.create() for _ in range(4)]
        for body, status in zip(bodies, (404, 404, 200, 200), strict=True):
            await room.get(body["id"], status=status)

    talk(scenario, ANSWER, config={"response_store_count": 2})


@pytest.mark.parametrize("form", ["recipient_first", "channel_first"])
def test_channel_first_headers_keep_the_prefix_of_chats_too(talk, o200k, form):
    """Chat completions keep nothing, so there the header of a replayed call decides."""
    sampled = o200k.encode_with_control(CALL)
    function = {k: v for k, v in TOOLS[0].items() if k != "type"}
    asked = {"model": "m", "tools": [{"type": "function", "function": function}]}

    async def scenario(room):
        messages = [{"role": "user", "content": "Hi"}]
        url = "/v1/chat/completions"
        answer = (await room.http.post(url, json={**asked, "messages": messages})).json()
        message = answer["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": "3"}
        await room.http.post(url, json={**asked, "messages": [*messages, message, result]})
        before, after = room.prompt(0), room.prompt(1)
        is_kept = after[: len(before) + len(sampled)] == [*before, *sampled]
        assert is_kept is (form == "channel_first")

    talk(scenario, CALL, ANSWER, config={"call_header": form})
