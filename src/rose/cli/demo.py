"""`rose demo`: both services on a model, a sum and a question that takes a tool over HTTP, and what they cost.

Everything that is printed as the model's was sampled just now. The tool is real too, though its weather is a
made-up table of this file.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from rose.cli.chat import Conversation, ServerError
from rose.cli.options import Number

DOLLARS_PER_HOUR = 3.0
"""Rent of the machine, as the cost tables take it for one H200."""
START_SECONDS = 120.0
QUESTIONS = ("What is 27 + 45?", "What is the weather in Paris?")
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
WEATHER = {
    "Paris": {"degrees": 21, "sky": "sunny"},
    "Oslo": {"degrees": -3, "sky": "snowy"},
    "Lima": {"degrees": 18, "sky": "foggy"},
}


@click.command()
@click.argument("model", required=False)
@click.option(
    "--question",
    "questions",
    multiple=True,
    default=QUESTIONS,
    show_default=True,
    help="Each begins a conversation of its own.",
)
@click.option(
    "--temperature", type=Number(min=0), default=0.0, show_default=True, help="0 is greedy."
)
def demo(model: str | None, questions: tuple[str, ...], temperature: float) -> None:
    """Start a server on MODEL (the embedded one without it), ask it the questions, and stop it.

    A tool is offered that knows the weather of three cities.
    """
    import httpx

    # Whoever ends this command ends its server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.perf_counter()
    with running_server(model) as url, httpx.Client(base_url=url, timeout=300) as http:
        click.secho(f"server ready in {time.perf_counter() - begin:.1f} s at {url}", fg="green")
        talk = TimedConversation(
            http,
            model=None,
            tools=[WEATHER_TOOL],
            options={
                "no_reasoning": False,
                "effort": None,
                "temperature": temperature,
                "max_tokens": 400,
                "seed": 1,
            },
        )
        for question in questions:
            talk.question(question)
        talk.report()


class TimedConversation(Conversation):
    """A conversation that remembers when its tokens came."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._body["stream_options"] = {"include_usage": True}
        self.first_token_s: list[float] = []
        self.decode_s = 0.0
        self.total_s = 0.0
        self.num_prompt_tokens = self.num_output_tokens = 0

    def question(self, text: str) -> None:
        """Ask in a conversation of its own, and run the tools that the model calls.

        Raises  ServerError where it ends without a final answer
        """
        click.secho(f"user> {text}", bold=True)
        self.messages.clear()
        reply = self.ask({"role": "user", "content": text})
        for _ in range(4):
            if not reply.get("tool_calls"):
                break
            reply = self.ask(*(_result(call) for call in reply["tool_calls"]))
        if not reply.get("content"):
            raise ServerError(
                "the conversation ended without a final answer; the model wrote the lines above; "
                "ask with another --question or --temperature"
            )

    def _stream(self) -> Iterator[dict[str, Any]]:
        begin = first = time.perf_counter()
        seen = False
        for chunk in super()._stream():
            if not seen and any(_has_text(c["delta"]) for c in chunk["choices"]):
                seen, first = True, time.perf_counter()
                self.first_token_s.append(first - begin)
            if chunk.get("usage"):
                self.num_prompt_tokens += chunk["usage"]["prompt_tokens"]
                self.num_output_tokens += chunk["usage"]["completion_tokens"]
            yield chunk
        self.decode_s += time.perf_counter() - first
        self.total_s += time.perf_counter() - begin

    def report(self) -> None:
        """Print time to first token, rate and cost."""
        from rose.utils.device import detect

        rate = self.num_output_tokens / self.decode_s if self.decode_s else 0.0
        dollars = self.total_s / 3600 * DOLLARS_PER_HOUR / max(1, self.num_output_tokens) * 1e6
        cost = (
            f"; ${dollars:.2f} per million output tokens at ${DOLLARS_PER_HOUR:.2f} an hour, one user"
            if detect("auto").kind == "cuda"
            else ""  # the price is a GPU's
        )
        first = ", ".join(f"{s * 1e3:.0f}" for s in self.first_token_s)
        click.secho(
            f"{self.num_prompt_tokens} prompt tokens, {self.num_output_tokens} output tokens; "
            f"first text after {first} ms; {rate:.0f} tokens/s{cost}",
            fg="green",
        )


@contextmanager
def running_server(model: str | None) -> Iterator[str]:
    """Run `rose serve` as a child until the block ends; yield its address once it is ready.

    Raises  ServerError with the end of its log when it ends or is not ready in time.
    """
    import tempfile

    from rose.frontend.access import KEYS_VARIABLE

    port = _free_port()
    command = [sys.executable, "-m", "rose.cli.main", "serve", *([model] if model else [])]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--log-level", "WARNING"],
            stdout=log,
            stderr=log,
            # Keys for another server are none of this one.
            env={name: value for name, value in os.environ.items() if name != KEYS_VARIABLE},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(url: str, process: subprocess.Popen, log: Any) -> None:
    import httpx

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    log.seek(0)
    # The command line puts "error: " before each line; the server has done so already.
    said = "\n".join(line.removeprefix("error: ") for line in log.read().splitlines()[-15:])
    if process.poll() is None:
        found = f"was still not ready after {START_SECONDS:.0f} s"
    else:
        found = f"ended with exit code {process.returncode} before it was ready"
    raise ServerError(f"the server {found}; its last lines:\n{said}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _result(call: dict[str, Any]) -> dict[str, Any]:
    """Run the tool; a city it does not know, or arguments that are no JSON, are told to the model."""
    try:
        city = json.loads(call["function"]["arguments"])["city"]
        found: Any = WEATHER.get(
            city, {"error": f"no weather for {city}; known: {', '.join(WEATHER)}"}
        )
    except (ValueError, KeyError, TypeError):
        found = {"error": "arguments must be a JSON object with city"}
    text = json.dumps(found, separators=(",", ":"))
    click.secho(f"tool> {text}", fg="magenta")
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def _has_text(delta: dict[str, Any]) -> bool:
    return any(delta.get(k) for k in ("content", "reasoning", "reasoning_content", "tool_calls"))
