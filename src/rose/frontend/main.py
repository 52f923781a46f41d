"""Run the frontend service: listen, follow the engine's state, end cleanly.

`rose serve` runs `Frontend` in its own process and the engine as a child; a frontend alone needs only the address
of an engine that somebody else started. Knows no command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import uvicorn

from rose.frontend.access import read_keys
from rose.frontend.app import create_app
from rose.frontend.client import EngineClient
from rose.frontend.config import FrontendConfig
from rose.frontend.http import HttpProtocol
from rose.frontend.jobs import Formatters, JobMaker
from rose.frontend.metrics import Metrics
from rose.frontend.siblings import Siblings
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
"""Called with a kind (listening, loading, ready, restarting, frontend, stopping, failed) and a text for people."""
Supervise = Callable[[EngineClient], Awaitable[str]]
"""Keeps engines running for a client; returns the reason once it gives them up."""


class Children(Protocol):
    """Frontends in processes of their own, see `rose.cli.frontends`."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    async def finish(self) -> None: ...


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
        formatters: Formatters,
        model_names: tuple[str, ...],
        announce: Announce,
        children: Children | None = None,
        shared_folder: Path | None = None,
    ) -> None:
        self._config = config
        self._children = children
        """Further frontends, which start, stop and end with this one."""
        self._siblings = None if shared_folder is None else Siblings(shared_folder)
        self._jobs = JobMaker(config, formatters, model_names=model_names)
        self._keys = read_keys(config, os.environ)
        self._scheme = _check_tls(config)
        self._announce = announce
        self._metrics = Metrics(
            peer=config.metrics_compat, model=model_names[0], siblings=self._siblings
        )
        self._exit_code = EXIT_OK
        self._stops: set[asyncio.Task[None]] = set()

    async def run(self, engines: str | Supervise, *, listener: socket.socket | None = None) -> int:
        """Serve until a signal, or until the engines are given up; return the exit code.

        Units   engines: the address of an engine that somebody else keeps running, or what keeps engines running
                for the client and returns, with the reason, once it gives them up
                listener: what to listen on, where that is not to be made of the configuration
        Raises  ConfigError where the address cannot be listened on.
        """
        listener = listener or listen(self._config)
        is_supervised = not isinstance(engines, str)
        client = EngineClient(
            None if is_supervised else FrontendEndpoint(engines),
            timeout_s=self._config.engine_timeout_s,
            is_supervised=is_supervised,
        )
        server = self._server(client)
        host, port = listener.getsockname()[:2]
        # The sockets' own words: 503 with engine_loading until the engine says that it is ready.
        self._announce("listening", f"{self._scheme}://{host}:{port} (the model is loading)")
        followers = [asyncio.create_task(self._follow(client))]
        if is_supervised:
            followers.append(asyncio.create_task(self._supervise(engines, client, server)))
        if self._siblings is not None:
            publishing = self._siblings.keep_publishing(self._metrics.own_families)
            followers.append(asyncio.create_task(publishing))
        if self._children is not None:
            self._children.start()
        with self._signals(client, server):
            await server.serve(sockets=[listener])
            if self._children is not None:
                await self._children.finish()
        for task in (*followers, *self._stops):
            task.cancel()
        await asyncio.gather(*followers, *self._stops, return_exceptions=True)
        return self._exit_code

    def _server(self, client: EngineClient) -> _Server:
        app = create_app(self._config, client, self._jobs, self._metrics, keys=self._keys)
        return _Server(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                ssl_certfile=self._config.ssl_certfile or None,
                ssl_keyfile=self._config.ssl_keyfile or None,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=int(
                    self._config.shutdown_timeout_s + CLOSING_SECONDS + UVICORN_SECONDS
                ),
            )
        )

    async def _follow(self, client: EngineClient) -> None:
        """Announce what the engine does, and each time it becomes ready."""
        shown, ready_engine = "", 0
        while True:
            status = client.status
            if client.is_ready and client.num_engines != ready_engine and status is not None:
                ready_engine = client.num_engines
                self._announce(
                    "ready",
                    f"{self._jobs.model_names[0]}, context of {status.context_tokens} tokens",
                )
            detail = "" if status is None or status.is_ready else status.detail
            if detail and detail != shown and not detail.startswith(FAILED_PREFIX):
                shown = detail
                self._announce("loading", detail)
            await asyncio.sleep(POLL_SECONDS)

    async def _supervise(self, engines: Supervise, client: EngineClient, server: _Server) -> None:
        reason = await engines(client)
        if client.is_draining:
            return  # the end is under way, and who still waited has been told
        self._exit_code = EXIT_ENGINE_DIED
        self._announce("failed", reason)
        if client.has_been_ready or client.num_engines > 1:
            # Probes and clients see 503 for a while instead of a refused connection.
            await asyncio.sleep(self._config.linger_s)
        server.should_exit = True

    def _waiting_for(self, num_open: int) -> str:
        if num_open == 0:
            return "no answer is open"
        seconds = self._config.shutdown_timeout_s
        return (
            f"waiting for {_answers(num_open)} (at most {seconds:g} s), Ctrl-C again ends at once"
        )

    async def _stop(self, client: EngineClient, server: _Server) -> None:
        """Let open answers finish while new requests are refused, then end the rest and the server."""
        end = time.monotonic() + self._config.shutdown_timeout_s
        while client.num_open and time.monotonic() < end and not server.should_exit:
            await asyncio.sleep(POLL_SECONDS)
        if client.num_open:
            self._end(client, server)
        server.should_exit = True

    def _end(self, client: EngineClient, server: _Server) -> None:
        """End what is open with its last event; connections that do not take it are dropped soon after."""
        if client.num_open:
            self._announce("stopping", f"ending {_answers(client.num_open)} that had not finished")
        client.end_open()
        server.should_exit = True
        asyncio.get_running_loop().call_later(CLOSING_SECONDS, server.drop_connections)

    @contextlib.contextmanager
    def _signals(self, client: EngineClient, server: _Server) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if self._children is not None:
                self._children.stop()
            if client.is_draining:
                self._end(client, server)
                return
            self._announce("stopping", self._waiting_for(client.num_open))
            client.drain()
            self._stops.add(loop.create_task(self._stop(client, server)))

        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)


def _answers(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"


def _check_tls(config: FrontendConfig) -> str:
    """Return the scheme of the server's address.

    Raises  ConfigError where certificate and key cannot be used together.
    """
    if not config.ssl_certfile:
        return "http"

    def refuse_password() -> str:
        raise ValueError("the key has a password")  # OpenSSL would ask the terminal for it

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, refuse_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile={config.ssl_certfile!r} with ssl_keyfile={config.ssl_keyfile!r} cannot be used: {error}; "
            "allowed: PEM files of a certificate and its private key, without a password; change --ssl-certfile "
            "or --ssl-keyfile"
        ) from error
    return "https"


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
