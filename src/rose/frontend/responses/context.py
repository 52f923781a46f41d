"""From a request and the store to the whole conversation that the model shall read.

Earlier responses and references are looked up, sealed reasoning is opened, and with truncation=auto the oldest
turns and steps are left out where the prompt would not fit. Knows the store and the formatter's body, no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from rose.frontend.errors import RequestError
from rose.frontend.parsing import quoted
from rose.frontend.responses.ids import item_id, response_of
from rose.frontend.responses.items import Item, read_items
from rose.frontend.responses.schemas import ResponsesRequest
from rose.frontend.responses.sealing import Sealer, SealError
from rose.frontend.responses.store import Record, Store, owned

Sampled = dict[int, list[int]]
Find = Callable[[str], Record | None]


class Cut(NamedTuple):
    """What stays of a context, the leading system and developer messages aside: two ends."""

    first: int
    """Place of the user's message that stays."""
    rest: int
    """Place from which on everything stays."""


@dataclass(slots=True, kw_only=True)
class Context:
    """What an answer is generated from, instructions and tools left out."""

    items: list[Item]
    sampled: Sampled = field(default_factory=dict)
    """Tokens of some items, by place."""

    def without(self, cut: Cut) -> Context:
        """Return the context without what a cut leaves out."""
        lead, n = _num_leading(self.items), len(self.items)
        kept = [*range(lead), cut.first, *range(cut.rest, n)]
        places = {old: new for new, old in enumerate(kept)}
        return Context(
            items=[self.items[i] for i in kept],
            sampled={places[i]: ids for i, ids in self.sampled.items() if i in places},
        )

    def cuts(self) -> list[Cut]:
        """Return what can be left out, ever more: the oldest turns one by one, then the oldest steps of the last turn.

        What is left begins with a message of the user, and every result of a call in it has its call.
        """
        lead = _num_leading(self.items)
        users = [i for i in range(lead, len(self.items)) if _is_user(self.items[i])]
        turns = [Cut(i, i + 1) for i in users if i > lead]
        return [*turns, *self._steps(users[-1])] if users else []

    def _steps(self, first: int) -> list[Cut]:
        cuts, num_open, answered = [], 0, set()
        calls = {i.get("call_id") for i in self.items if i["type"] == "function_call_output"}
        for place in range(first + 1, len(self.items) - 1):
            item, following = self.items[place], self.items[place + 1]
            if item["type"] == "function_call" and item["call_id"] in calls:
                num_open += 1
            if item["type"] == "function_call_output" and item["call_id"] not in answered:
                answered.add(item["call_id"])
                num_open -= 1
                if num_open == 0 and following["type"] != "function_call_output":
                    cuts.append(Cut(first, place + 1))
        return cuts


def resolve(
    request: ResponsesRequest, response_id: str, store: Store, sealer: Sealer, *, owner: str
) -> Context:
    """Return the conversation of a request; `response_id` is that of the response to come, `owner` whose it will be.

    Raises  RequestError for what is not stored (any more) and for what cannot be opened.
    """
    own = read_items(
        request.input, lambda prefix, i: item_id(prefix, response_id, i, is_input=True)
    )

    @cache  # many references are to one response
    def find(name: str) -> Record | None:
        return owned(store.get(name), owner)

    context = _previous(request.previous_response_id, find)
    first = len(context.items)
    for place, item in enumerate(own):
        if item["type"] == "item_reference":
            _add_referenced(context, item["id"], place, find)
        else:
            context.items.append(item)
    _recall(context, first, response_id, find)
    _open_sealed(context, first, sealer)
    return context


def body_of(request: ResponsesRequest, context: Context) -> dict[str, Any]:
    """Return the body that a formatter reads: the request's fields with the whole conversation as `input`."""
    reasoning, text = request.reasoning, request.text
    tools = list(enumerate(request.tools or []))
    # The prompt depends on what may be called, not on what must be; the grammar knows that.
    choice = request.tool_choice
    is_told = choice == "none" or (
        isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    )
    return {
        "api": "responses",
        "instructions": request.instructions,
        "input": context.items,
        "sampled_tokens": context.sampled,
        "tools": [tool for _, tool in tools if tool["type"] == "function"],
        "namespaces": [{**t, "place": i} for i, t in tools if t["type"] == "namespace"],
        "tool_choice": choice if is_told else None,
        "reasoning": {"effort": reasoning.effort} if reasoning else None,
        "text": {"format": text.format} if text else None,
    }


def of_record(record: Record) -> Context:
    """Return what a next turn reads of a stored response: its conversation and its answer."""
    output = [{**item, "hidden": True} if record.is_hidden else item for item in record.output]
    return Context(items=[*record.history, *output], sampled=dict(record.sampled))


def _previous(response_id: str | None, find: Find) -> Context:
    if response_id is None:
        return Context(items=[])
    record = find(response_id)
    if record is None:
        raise RequestError(
            "previous_response_not_found",
            f"previous_response_id={quoted(response_id)} is not stored here (any more); send the whole conversation "
            "as input, or raise the limits of --response-store",
            param="previous_response_id",
        )
    if record.status not in ("completed", "incomplete"):
        raise RequestError(
            "invalid_request",
            f"previous_response_id={quoted(response_id)} is {record.status}; allowed: a response that is completed "
            "or incomplete; wait for it",
            param="previous_response_id",
        )
    return of_record(record)


def _add_referenced(context: Context, reference: str, place: int, find: Find) -> None:
    response_id = response_of(reference)
    record = find(response_id) if response_id else None
    known = of_record(record) if record else Context(items=[])
    for i, item in enumerate(known.items):
        if item["id"] == reference:
            if i in known.sampled:
                context.sampled[len(context.items)] = known.sampled[i]
            context.items.append(item)
            return
    raise RequestError(
        "item_not_found",
        f"input[{place}] refers to {quoted(reference)}, which is not stored here (any more); send the item itself",
        param=f"input[{place}].id",
    )


def _recall(context: Context, first: int, own_id: str, find: Find) -> None:
    """Find items that the client sends back as they came: their tokens, and reasoning that it was not shown.

    The newest item of an earlier response tells the response whose record has all the others, since a record holds
    its whole conversation.
    """
    own = range(first, len(context.items))
    found = (response_of(context.items[i].get("id", "")) for i in reversed(own))
    response_id = next((name for name in found if name not in (None, own_id)), None)
    record = find(response_id) if response_id else None
    if record is None:
        return
    known = of_record(record)
    places = {item["id"]: place for place, item in enumerate(known.items)}
    for i in own:
        item = context.items[i]
        place = places.get(item["id"])
        if place is None:
            continue
        stored = known.items[place]
        if item["type"] == "reasoning" == stored["type"] and _is_empty(item):
            context.items[i] = item = {**stored, "hidden": True}
        if place in known.sampled and _says(item) == _says(stored):
            context.sampled[i] = known.sampled[place]


def _is_empty(reasoning: Item) -> bool:
    """Return whether an item of reasoning has nothing to read."""
    return not any(reasoning.get(name) for name in ("content", "summary", "encrypted_content"))


def _says(item: Item) -> tuple[str, ...]:
    """Return what the model reads of an item of its own."""
    if item["type"] == "function_call":
        return (item["type"], item.get("namespace", ""), item["name"], item["arguments"])
    parts = item.get("content") or []
    return (item["type"], *(part.get("text", "") for part in parts if isinstance(part, dict)))


def _open_sealed(context: Context, first: int, sealer: Sealer) -> None:
    """Open sealed reasoning of the request's own items; text that came beside it is taken as it is."""
    for i in range(first, len(context.items)):
        item = context.items[i]
        sealed = item.get("encrypted_content")
        if item["type"] != "reasoning" or sealed is None or item.get("content"):
            continue
        param = f"input[{i - first}].encrypted_content"
        try:
            text = sealer.open(sealed)
        except SealError as error:
            raise RequestError(
                "invalid_encrypted_content",
                f"{param} cannot be read: {error}; send the reasoning item as this server sent it, or leave it out",
                param=param,
            ) from error
        content = [{"type": "reasoning_text", "text": text}]
        context.items[i] = {**item, "content": content, "hidden": True}


def _is_user(item: Item) -> bool:
    return item["type"] == "message" and item["role"] == "user"


def _num_leading(items: list[Item]) -> int:
    for i, item in enumerate(items):
        if item["type"] != "message" or item["role"] not in ("system", "developer"):
            return i
    return len(items)
