"""Messages <-> bytes: one version byte, then msgpack.

Frames to the engine hold one message; frames from the engine hold the events of a whole step, so that 128
sequences cost one frame. Knows nothing of sockets.
"""

from __future__ import annotations

import msgspec

from rose.protocol.event import FromEngine
from rose.protocol.request import ToEngine
from rose.utils.errors import RoseError

PROTOCOL_VERSION = 4
"""Raised by every change after which an older peer would misread a frame."""

_PREFIX = bytes([PROTOCOL_VERSION])
_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


class ProtocolError(RoseError):
    """A frame that is not a message of this version of the protocol."""


def encode_to_engine(message: ToEngine) -> bytes:
    """Return the frame of one request, abort or query."""
    return _PREFIX + _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Return the message in a frame.

    Raises  ProtocolError where version, tag or a field is wrong.
    """
    return _decode(_to_engine, frame, "request, abort, status_query or vocabulary")


def encode_from_engine(events: list[FromEngine]) -> bytes:
    """Return the frame of the events of one step, in order."""
    return _PREFIX + _encoder.encode(events)


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    """Return the events in a frame, in order.

    Raises  ProtocolError where version, tag or a field is wrong.
    """
    return _decode(_from_engine, frame, "list of tokens, finished, error or status")


def _decode(decoder: msgspec.msgpack.Decoder, frame: bytes, allowed: str):  # noqa: ANN202
    if not frame:
        raise ProtocolError(
            f"an empty frame arrived; allowed: version byte {PROTOCOL_VERSION}, then a {allowed}; "
            "check what else writes to this channel"
        )
    if frame[0] != PROTOCOL_VERSION:
        raise ProtocolError(
            f"a frame of protocol version {frame[0]} arrived; this process speaks version "
            f"{PROTOCOL_VERSION}; run frontend and engine from the same release"
        )
    try:
        return decoder.decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"a frame of {len(frame)} bytes cannot be read: {error}; allowed: a {allowed}; "
            "run frontend and engine from the same release"
        ) from error
