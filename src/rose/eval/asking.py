"""Questions put to the Python engine or to a server over HTTP; greedy, so answers are the model's first choice."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rose.config.quant import QuantConfig
from rose.eval.examples import Example
from rose.eval.scoring import Reply
from rose.eval.tool_tasks import compact
from rose.utils.errors import RoseError
from rose.utils.urls import server_root

CONCURRENT = 16
"""Requests in flight to a server."""


class AskError(RoseError):
    """A server that did not answer."""


def token_limit(example: Example) -> int:
    """Return room for twice the right answer: a token is a character at least."""
    answer = example.content or compact(example.call)
    return 64 + len(example.reasoning) + len(answer)


class EngineAsker:
    """The engine in this process."""

    def __init__(self, folder: Path, *, quant: QuantConfig, device: str) -> None:
        from rose.config.engine import EngineConfig
        from rose.engine.engine import LLMEngine
        from rose.frontend.formatters.registry import build_formatter
        from rose.frontend.tokenizer import load_tokenizer
        from rose.models.gpt_oss.weights import checkpoint_format
        from rose.utils.device import detect

        self.tokenizer = load_tokenizer(folder)
        self._formatter = build_formatter("harmony", self.tokenizer)
        config = EngineConfig(model=str(folder), device=device, quant=quant)
        config = config.resolve(detect(device), checkpoint_format=checkpoint_format(folder))
        self.quant = config.quant
        """With every format decided."""
        self.engine = LLMEngine.from_config(config)

    def ask(self, examples: Sequence[Example]) -> list[Reply]:
        """Answer all in one batch, as many at a time as the engine takes."""
        from rose.protocol.request import Request
        from rose.protocol.sampling_params import SamplingParams

        prompts = [self._formatter.encode(example.body) for example in examples]
        requests = [
            Request(
                request_id=str(i),
                prompt_token_ids=prompt.token_ids,
                stop_token_ids=prompt.stop_token_ids,
                max_tokens=token_limit(example),
                sampling=SamplingParams(temperature=0),
            )
            for i, (example, prompt) in enumerate(zip(examples, prompts, strict=True))
        ]
        generations = self.engine.generate(requests)
        return [
            self._read(prompt.declared_tools, generation.token_ids, str(generation.reason))
            for prompt, generation in zip(prompts, generations, strict=True)
        ]

    def _read(self, tools: Sequence[str], token_ids: list[int], reason: str) -> Reply:
        decoder = self._formatter.decoder(declared_tools=tools)
        decoder.push(token_ids)
        decoder.finish(reason)
        answer = decoder.answer()
        channels = [m.channel for m in answer.messages]
        ends = ["final"] if not answer.tool_calls else ["commentary"]
        return Reply(
            content=answer.content,
            calls=[(call["name"], call["arguments"]) for call in answer.tool_calls],
            is_well_formed=reason == "stop"
            and not answer.recoveries
            and channels == ["analysis", *ends],
            reasoning_characters=len(answer.reasoning or ""),
        )


class HttpAsker:
    """A server with the chat API. What it says is all there is: recoveries of a parser are not seen from here."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        import httpx

        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=server_root(url), timeout=timeout_s, headers=headers)
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self.model = model or self._first_model()

    def ask(self, examples: Sequence[Example]) -> list[Reply]:
        """Answer all, some at a time."""
        with ThreadPoolExecutor(CONCURRENT) as pool:
            return list(pool.map(self._ask, examples))

    def _first_model(self) -> str:
        return self._json("GET", "/v1/models")["data"][0]["id"]

    def _ask(self, example: Example) -> Reply:
        limit = token_limit(example)
        body = {
            **example.body,
            "model": self.model,
            "temperature": 0,
            "max_completion_tokens": limit,
        }
        body.pop("conversation_date", None)  # a server has its own day
        choice = self._json("POST", "/v1/chat/completions", json=body)["choices"][0]
        message = choice["message"]
        calls = [c["function"] for c in message.get("tool_calls") or []]
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        has_one_end = bool(message.get("content")) != bool(calls)
        return Reply(
            content=message.get("content"),
            calls=[(c["name"], c["arguments"]) for c in calls],
            is_well_formed=choice["finish_reason"] in ("stop", "tool_calls")
            and bool(reasoning)
            and has_one_end,
            reasoning_characters=len(reasoning),
        )

    def _json(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = self._http.request(method, path, **options)
        except self._errors as error:
            raise AskError(
                f"no answer from {self._http.base_url}: {error}; start a server with rose serve or change --url"
            ) from error
        if response.status_code != 200:
            raise AskError(
                f"{path} answered with status {response.status_code}: {response.text[:300]}; needed: 200; "
                "see the server's log"
            )
        return response.json()
