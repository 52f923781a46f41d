"""HTTP as uvicorn speaks it, with two rules of ours: heads are bounded, and what is no HTTP gets our error object."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rose.frontend.errors import RequestError, error_body
from rose.frontend.reply import JSON

MAX_HEAD_BYTES = 65_536
"""Request line and headers together. Without a limit one client could fill the memory with a header that never ends."""


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _is_head = True
    _num_head_bytes = 0

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

    def on_message_begin(self) -> None:
        """Begin to count anew."""
        self._is_head = True
        super().on_message_begin()

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
