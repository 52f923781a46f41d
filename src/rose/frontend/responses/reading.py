"""What clients get of a stored response: its body, and what it was generated from. Knows records, no store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rose.frontend.errors import RequestError
from rose.frontend.parsing import quoted
from rose.frontend.responses.items import Item, without_reasoning
from rose.frontend.responses.parsing import ENCRYPTED_REASONING, check_include
from rose.frontend.responses.schemas import ItemList
from rose.frontend.responses.sealing import Sealer
from rose.frontend.responses.store import Record

PAGE_ITEMS = 20
MAX_PAGE_ITEMS = 100
TRUE_WORDS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """How a response is asked for."""

    is_stream: bool
    first: int
    """The first event wanted."""
    with_encrypted: bool


class Reader:
    """Shows records; `hides`: this server hides reasoning, also what it showed in earlier days."""

    def __init__(self, sealer: Sealer, *, hides: bool) -> None:
        self._sealer = sealer
        self._hides = hides

    def query(self, given: Mapping[str, str]) -> Query:
        """Return what the query of GET /v1/responses/{id} asks for.

        Raises  RequestError naming the parameter.
        """
        include = _list(given, "include")
        check_include(include)
        after = _number(given, "starting_after", -1, allowed="the sequence_number of an event")
        word = given.get("stream", "false").lower()
        if word not in TRUE_WORDS:
            raise _wrong("stream", word, "true or false")
        if not TRUE_WORDS[word] and "starting_after" in given:
            raise _wrong("starting_after", after, "nothing without stream=true")
        return Query(
            is_stream=TRUE_WORDS[word],
            first=after + 1,
            with_encrypted=ENCRYPTED_REASONING in include,
        )

    def body(self, record: Record, query: Query) -> bytes:
        """Return the JSON of a response."""
        if not self._hides and not query.with_encrypted:
            return bytes(record.body)
        body = msgspec.json.decode(record.body)
        if self._hides:
            body.pop("raw_messages", None)
            body["output"] = [without_reasoning(item) for item in body["output"]]
        if query.with_encrypted:
            for item, private in zip(body["output"], record.output, strict=True):
                self._add_encrypted(item, private)
        return msgspec.json.encode(body)

    def input_items(self, record: Record, given: Mapping[str, str]) -> ItemList:
        """Return a page of the items that a response was generated from; the newest first, or order=asc.

        Raises  RequestError naming the parameter.
        """
        include = _list(given, "include")
        check_include(include)
        limit = _number(given, "limit", PAGE_ITEMS, allowed=f"1 to {MAX_PAGE_ITEMS}")
        if not 1 <= limit <= MAX_PAGE_ITEMS:
            raise _wrong("limit", limit, f"1 to {MAX_PAGE_ITEMS}")
        order = given.get("order", "desc")
        if order not in ("asc", "desc"):
            raise _wrong("order", order, "asc or desc")
        items = record.history if order == "asc" else record.history[::-1]
        if "after" in given:
            places = [i for i, item in enumerate(items) if item["id"] == given["after"]]
            if not places:
                raise _wrong("after", given["after"], "the id of an item of this response's input")
            items = items[places[0] + 1 :]
        page = [
            self._shown(item, is_sealed=ENCRYPTED_REASONING in include) for item in items[:limit]
        ]
        return ItemList(
            data=page,
            has_more=len(items) > limit,
            first_id=page[0]["id"] if page else "",
            last_id=page[-1]["id"] if page else "",
        )

    def _shown(self, item: Item, *, is_sealed: bool) -> Item:
        shown = {name: value for name, value in item.items() if name != "hidden"}
        if self._hides or item.get("hidden"):
            shown = without_reasoning(shown)
        if is_sealed:
            self._add_encrypted(shown, item)
        return shown

    def _add_encrypted(self, shown: Item, private: Item) -> None:
        if shown["type"] == "reasoning" and private.get("content"):
            text = "".join(part["text"] for part in private["content"])
            shown["encrypted_content"] = self._sealer.seal(text)


def _list(given: Mapping[str, str], name: str) -> list[str]:
    """Return a repeated parameter, written name=a&name=b or name[]=a."""
    getlist = getattr(given, "getlist", None)
    if getlist is None:
        return []
    return [*getlist(name), *getlist(f"{name}[]")]


def _number(given: Mapping[str, str], name: str, default: int, *, allowed: str) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise _wrong(name, text, allowed)
    return int(text)


def _wrong(name: str, found: Any, allowed: str) -> RequestError:
    return RequestError(
        "invalid_request", f"{name}={quoted(found)}; allowed: {allowed}", param=name
    )
