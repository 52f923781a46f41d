"""`rose chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from rose.cli.options import AnyNumber, api_key_option
from rose.utils.errors import RoseError
from rose.utils.text_file import read_text
from rose.utils.urls import server_root

CONNECT_SECONDS = 5.0
MAX_TRIES = 4
"""Of a request that a server cannot take at the moment (503)."""
MAX_PAUSE_S = 5.0
"""Before the next try, whatever the server asks for."""
Message = dict[str, Any]


class ServerError(RoseError):
    """What a server answered instead of a reply, or that there was none."""


@click.command()
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="Where the server is."
)
@api_key_option
@click.option("--model", help="Name of the model.  [default: the server's first]")
@click.option("--once", metavar="TEXT", help="Ask one question and exit.")
@click.option("--system", metavar="TEXT", help="Instructions for the model.")
@click.option(
    "--tools",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON list of tools in the form of chat completions; calls are shown, you type their results.",
)
@click.option(
    "--effort",
    help="Reasoning effort: low, medium or high; minimal counts as low, xhigh and max as high.",
)
@click.option("--temperature", type=AnyNumber(), help="0 to 100; 0 is greedy.")
@click.option("--max-tokens", type=int, help="Most tokens of one answer.")
@click.option("--seed", type=int, help="Equal seeds give equal answers.")
@click.option("--no-reasoning", is_flag=True, help="Do not show the reasoning.")
def chat(
    url: str,
    api_key: str | None,
    model: str | None,
    once: str | None,
    system: str | None,
    tools: Path | None,
    **options: Any,
) -> None:
    """Talk to a server. Reasoning is shown dimmed; an empty line or Ctrl-D ends the conversation."""
    import httpx

    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=server_root(url), timeout=timeout, headers=headers) as http:
        conversation = Conversation(http, model=model, tools=_read_tools(tools), options=options)
        if system is not None:
            conversation.messages.append({"role": "developer", "content": system})
        if once is not None:
            conversation.ask({"role": "user", "content": once})
            return
        _talk(conversation)


def _talk(conversation: Conversation) -> None:
    while True:
        try:
            text = click.prompt("you", prompt_suffix="> ", default="", show_default=False)
        except click.Abort:
            click.echo()
            return
        if not text.strip():
            return
        reply = conversation.ask({"role": "user", "content": text})
        while reply.get("tool_calls"):
            reply = conversation.answer_calls(reply["tool_calls"])


class Conversation:
    """The messages so far, and the server they are sent to."""

    def __init__(
        self, http: Any, *, model: str | None, tools: list[Any] | None, options: dict[str, Any]
    ) -> None:
        self._http = http
        self._show_reasoning = not options["no_reasoning"]
        self._body = {
            "reasoning_effort": options["effort"],
            "temperature": options["temperature"],
            "max_completion_tokens": options["max_tokens"],
            "seed": options["seed"],
            "tools": tools,
        }
        self._body = {name: value for name, value in self._body.items() if value is not None}
        self._body["model"] = model or self._first_model()
        self.messages: list[Message] = []

    def ask(self, *messages: Message) -> Message:
        """Send messages, show the answer as it comes, remember and return it."""
        self.messages += messages
        reply: Message = {"role": "assistant", "content": ""}
        shown = Shown(self._show_reasoning)
        for chunk in self._stream():
            for choice in chunk["choices"]:
                _add(reply, choice["delta"])
                shown.delta(choice["delta"])
                if choice["finish_reason"] == "length":
                    shown.note("cut off at the limit of tokens")
        shown.end()
        reply["content"] = reply["content"] or None
        self.messages.append(reply)
        return reply

    def answer_calls(self, calls: list[dict[str, Any]]) -> Message:
        """Ask the person for the results of calls and send them."""
        results = []
        for call in calls:
            text = click.prompt(f"result of {call['function']['name']}", default="")
            results.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return self.ask(*results)

    def _first_model(self) -> str:
        try:
            response = self._http.get("/v1/models")
        except _http_errors() as error:
            raise _unreachable(self._http, error) from error
        if response.status_code != 200:
            raise ServerError(_said(response.status_code, response.content))
        return response.json()["data"][0]["id"]

    def _stream(self) -> Iterator[dict[str, Any]]:
        body = {**self._body, "messages": self.messages, "stream": True}
        for num_left in reversed(range(MAX_TRIES)):
            try:
                with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code == 200:
                        yield from _chunks(response.iter_lines())
                        return
                    said = _said(response.status_code, response.read())
                    pause_s = _pause_s(response)
            except _http_errors() as error:
                raise _unreachable(self._http, error) from error
            if pause_s is None or not num_left:
                raise ServerError(said)
            click.secho(f"{said}; asking again in {pause_s:g} s", fg="yellow", err=True)
            time.sleep(pause_s)


class Shown:
    """The answer on the terminal: reasoning dimmed, content plain, calls in colour."""

    def __init__(self, show_reasoning: bool) -> None:
        self._show_reasoning = show_reasoning
        self._kind = ""

    def delta(self, delta: dict[str, Any]) -> None:
        """Show one piece."""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content")
        if reasoning and self._show_reasoning:
            self._write("reasoning", reasoning, dim=True)
        if delta.get("content"):
            self._write("content", delta["content"])
        for piece in delta.get("tool_calls") or []:
            function = piece["function"]
            if function.get("name"):
                self._write(f"call {piece['index']}", f"{function['name']} ", fg="cyan", bold=True)
            self._write(f"call {piece['index']}", function.get("arguments") or "", fg="cyan")

    def note(self, text: str) -> None:
        """Show a remark of ours."""
        self._write("note", f"[{text}]", fg="yellow")

    def end(self) -> None:
        """Finish the last line."""
        click.echo()

    def _write(self, kind: str, text: str, **style: Any) -> None:
        if self._kind and kind != self._kind:
            click.echo()
        self._kind = kind
        # One style per piece, so that a cut stream never leaves the terminal dimmed.
        click.echo(click.style(text, **style) if style else text, nl=False)


def _add(reply: Message, delta: dict[str, Any]) -> None:
    reply["content"] += delta.get("content") or ""
    if delta.get("reasoning"):
        reply["reasoning"] = reply.get("reasoning", "") + delta["reasoning"]
    for piece in delta.get("tool_calls") or []:
        calls = reply.setdefault("tool_calls", [])
        if "id" in piece:
            function = {"name": piece["function"]["name"], "arguments": ""}
            calls.append({"id": piece["id"], "type": "function", "function": function})
        calls[piece["index"]]["function"]["arguments"] += piece["function"].get("arguments") or ""


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ServerError(f"the answer was cut off: {chunk['error']['message']}")
        yield chunk


def _said(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} (status {status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}: {body[:200].decode(errors='replace')}"


def _pause_s(response: Any) -> float | None:
    """Return when to ask again; None where asking again would not help."""
    if response.status_code != 503:
        return None
    asked = response.headers.get("retry-after", "")
    return min(float(asked), MAX_PAUSE_S) if asked.isdigit() else 1.0


def _unreachable(http: Any, error: Exception) -> ServerError:
    return ServerError(
        f"no answer from {http.base_url}: {error}; start a server with rose serve or change --url"
    )


def _http_errors() -> tuple[type[Exception], ...]:
    import httpx

    return (httpx.HTTPError, httpx.InvalidURL)


def _read_tools(path: Path | None) -> list[Any] | None:
    if path is None:
        return None
    try:
        tools = json.loads(read_text(path, wanted="a JSON list of tools"))
    except ValueError as error:
        raise ServerError(f"{path} is not JSON: {error}; allowed: a list of tools") from error
    if not isinstance(tools, list):
        raise ServerError(f"{path} holds {type(tools).__name__}; allowed: a list of tools")
    return tools
