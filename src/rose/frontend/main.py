"""Run the frontend service: listen, follow the engine's state, end cleanly.

`rose serve` runs `Frontend` in its own process and the engine as a child; a frontend alone needs only the address
of an engine that somebody else started. Knows no command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from rose.frontend.app import create_app
from rose.frontend.client import EngineClient
from rose.frontend.config import FrontendConfig
from rose.frontend.jobs import Formatters, JobMaker
from rose.frontend.metrics import Metrics
from rose.protocol.channel import FrontendEndpoint
from rose.utils.errors import ConfigError

EXIT_OK = 0
EXIT_ENGINE_DIED = 1
POLL_SECONDS = 0.05
"""How often the engine's state is looked at while it loads."""
FAILED_PREFIX = "failed: "
"""How an engine that could not start begins the last `detail` of its status."""
CLOSING_SECONDS = 1.0
"""What answers that were cut off get to write their last event; a client that does not read is dropped then."""
UVICORN_SECONDS = 5.0
"""What uvicorn gets beyond that before it cancels handlers, which would print tracebacks. Never reached, unless a
handler hangs."""

Announce = Callable[[str, str], None]
"""Called with a kind (listening, loading, ready, stopping, failed) and a text for people."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: it would re-raise the signal and skip our clean-up."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def drop_connections(self) -> None:
        """Close every connection without a farewell; handlers see a client that left and end quietly."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                # Told before it happens: the loop would tell later, and a handler could write in between.
                connection.connection_lost(None)
                transport.abort()


class Frontend:
    """One HTTP server in front of one engine."""

    def __init__(
        self,
        config: FrontendConfig,
        *,
        address: str,
        formatters: Formatters,
        model_names: tuple[str, ...],
        announce: Announce,
    ) -> None:
        self._config = config
        self._address = address
        self._jobs = JobMaker(config, formatters, model_names=model_names)
        self._announce = announce
        self._exit_code = EXIT_OK

    async def run(self, engine_death: asyncio.Future[str] | None = None) -> int:
        """Serve until a signal or the engine's death; return the exit code.

        `engine_death` resolves to the reason once the engine's process has ended.
        Raises  ConfigError where the address cannot be listened on.
        """
        listener = listen(self._config)
        client = EngineClient(
            FrontendEndpoint(self._address), timeout_s=self._config.engine_timeout_s
        )
        server = self._server(client)
        host, port = listener.getsockname()[:2]
        # The sockets' own words: 503 with engine_loading until the engine says that it is ready.
        self._announce("listening", f"http://{host}:{port} (the model is loading)")
        followers = [asyncio.create_task(self._follow(client))]
        if engine_death is not None:
            followers.append(asyncio.create_task(self._watch(engine_death, client, server)))
        with self._signals(client, server):
            await server.serve(sockets=[listener])
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        return self._exit_code

    def _server(self, client: EngineClient) -> _Server:
        app = create_app(self._config, client, self._jobs, Metrics())
        return _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=int(
                    self._config.shutdown_timeout_s + CLOSING_SECONDS + UVICORN_SECONDS
                ),
            )
        )

    async def _follow(self, client: EngineClient) -> None:
        """Announce what the engine does until it is ready."""
        shown = ""
        while not client.is_ready:
            detail = client.status.detail if client.status else ""
            if detail and detail != shown and not detail.startswith(FAILED_PREFIX):
                shown = detail
                self._announce("loading", detail)
            await asyncio.sleep(POLL_SECONDS)
        status = client.status
        assert status is not None, "ready means that a status has come"
        self._announce(
            "ready",
            f"{self._jobs.model_names[0]}, context of {status.context_tokens} tokens",
        )

    async def _watch(
        self, engine_death: asyncio.Future[str], client: EngineClient, server: _Server
    ) -> None:
        # Shielded: this task is cancelled at a normal end, the future belongs to who ends the engine.
        reason = await asyncio.shield(engine_death)
        if server.should_exit:
            client.mark_dead(reason)  # who still waits for an answer waits in vain
            return
        self._exit_code = EXIT_ENGINE_DIED
        was_ready = client.is_ready
        detail = client.status.detail if client.status else ""
        if not was_ready and detail.startswith(FAILED_PREFIX):
            reason = detail.removeprefix(FAILED_PREFIX)
        client.mark_dead(reason)
        self._announce("failed", reason)
        if was_ready:
            # Probes and clients see 503 for a while instead of a refused connection.
            await asyncio.sleep(self._config.linger_s)
        server.should_exit = True

    def _waiting_for(self, num_open: int) -> str:
        if num_open == 0:
            return "no answer is open"
        answers = "1 answer" if num_open == 1 else f"{num_open} answers"
        seconds = self._config.shutdown_timeout_s
        return f"waiting for {answers} (at most {seconds:g} s), Ctrl-C again ends at once"

    @contextlib.contextmanager
    def _signals(self, client: EngineClient, server: _Server) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def end_answers() -> None:
            client.end_open()
            loop.call_later(CLOSING_SECONDS, server.drop_connections)

        def on_signal() -> None:
            if server.should_exit:
                end_answers()
                return
            self._announce("stopping", self._waiting_for(client.num_open))
            server.should_exit = True
            loop.call_later(self._config.shutdown_timeout_s, end_answers)

        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)


def listen(config: FrontendConfig) -> socket.socket:
    """Return a socket bound to the configured address.

    Raises  ConfigError where it is taken or does not exist.
    """
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; allowed: an address of this machine "
            "and a free port (0 takes any); change --host or --port"
        ) from error
    return bound


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
