"""HTTP as uvicorn speaks it, with four rules of ours: heads are bounded, what is no HTTP gets our error object, the
parts of a stream that are sent together leave in one system call, and an answer that did not all leave is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rose.frontend.errors import RequestError, error_body
from rose.frontend.reply import JSON

MAX_HEAD_BYTES = 65_536
"""Request line and headers together. Without a limit one client could fill the memory with a header that never ends."""

FAREWELL_SECONDS = 0.5
"""What the other side of an idle connection gets to say that it has heard of the end; over TLS that is waited for."""
HELD_WRITES = "rose.held_writes"
"""In the scope: the connection's `HeldWrites`."""


class HeldWrites(asyncio.Transport):
    """A transport that can hold writes back and give them to the real one as one, and knows whether they left.

    The tokens of a stream come one by one and are sent one by one. Where several wait, a system call for each would be
    half of the server's work.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._held: list[bytes] = []
        self._is_lost = False
        self._tell_loss: Callable[[], None] | None = None
        # The transport's own function, or the list's: one of Python between them would be called for every token.
        self.write = transport.write  # type: ignore[method-assign]

    def __enter__(self) -> None:
        """Begin to hold."""
        self.write = self._held.append  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        """Write what was held."""
        self.write = self._transport.write  # type: ignore[method-assign]
        if self._held:
            self.write(b"".join(self._held))
            self._held.clear()

    def if_lost(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, once, if the connection ends before all that was written has left; or has ended so."""
        if self._is_lost:
            tell()
        elif self._transport.get_write_buffer_size():
            self._tell_loss = tell
            # Where nothing may wait, the transport resumes writing when the last byte has left.
            self._transport.set_write_buffer_limits(high=0)

    def all_left(self) -> None:
        """Take note that nothing waits."""
        if self._tell_loss is not None:
            self._tell_loss = None
            self._transport.set_write_buffer_limits()

    def lost(self, *, is_whole: bool) -> None:
        """Take note that the connection has ended; `is_whole`: after the whole answer was written."""
        self._is_lost = not is_whole
        if self._tell_loss is not None:
            self._tell_loss()

    def close(self) -> None:
        """Close when everything is written."""
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def abort_if_idle(self) -> None:
        """Close at once if nothing waits to be written."""
        if not self._transport.get_write_buffer_size():
            self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether it is closed or will be."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Read no more."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the transport knows of the connection."""
        return self._transport.get_extra_info(name, default)


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _is_head = True
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        self._writes = HeldWrites(transport)
        super().connection_made(self._writes)

    def data_received(self, data: bytes) -> None:
        """Take what came; end the connection of a head that is too long."""
        if self._is_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        # Only heads that are still open: the piece that ends one is bounded by what a read of the socket brings.
        if self._is_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                RequestError(
                    "head_too_large",
                    f"the request line and headers have more than {MAX_HEAD_BYTES} bytes; send shorter ones",
                )
            )

    def resume_writing(self) -> None:
        """Write again."""
        self._writes.all_left()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        # A whole answer after which the connection is to end has ended it by now.
        self._writes.lost(is_whole=self.cycle is None or self.cycle.response_complete)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End with the server: at once where nothing is answered, else with the answer."""
        super().shutdown()
        if self._writes.is_closing():
            self.loop.call_later(FAREWELL_SECONDS, self._writes.abort_if_idle)

    def on_message_begin(self) -> None:
        """Begin to count anew."""
        self._is_head = True
        super().on_message_begin()
        self.scope[HELD_WRITES] = self._writes  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """Stop counting."""
        self._is_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Count the next request's head."""
        super().on_message_complete()
        self._is_head = True

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(RequestError("invalid_http", "the request is not HTTP/1.1; use a HTTP client"))

    def _refuse(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        body = error_body(error)
        head = f"content-type: {JSON}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.kind.status] + head.encode() + body)
        self.transport.close()
