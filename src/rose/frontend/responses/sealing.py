"""Reasoning in a form that a client can keep and give back, and nobody but this server can read.

AES-256-GCM under a key that is read from a file, or made when the server starts: then what was sealed is good as
long as the process lives. Knows nothing of items.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rose.utils.errors import ConfigError, RoseError

VERSION = "rose1."
NONCE_BYTES = 12
"""Random nonces are safe for 2**32 texts under one key (NIST SP 800-38D, 8.3)."""
MIN_KEY_BYTES = 32


class SealError(RoseError):
    """What was given back was not sealed here, or not under this key."""


class Sealer:
    """Seals and opens texts."""

    def __init__(self, secret: bytes) -> None:
        self._cipher = AESGCM(hashlib.sha256(b"rose encrypted reasoning" + secret).digest())

    def seal(self, text: str) -> str:
        """Return a text that tells nothing of what it holds but its length."""
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, text.encode(), VERSION.encode())
        return VERSION + base64.urlsafe_b64encode(sealed).decode()

    def open(self, sealed: str) -> str:
        """Return the text.

        Raises  SealError
        """
        try:
            raw = base64.urlsafe_b64decode(sealed.removeprefix(VERSION))
            nonce, rest = raw[:NONCE_BYTES], raw[NONCE_BYTES:]
            return self._cipher.decrypt(nonce, rest, VERSION.encode()).decode()
        except (InvalidTag, binascii.Error, ValueError) as error:
            raise SealError("it was not sealed by this server, or under another key") from error


def load_sealer(path: str) -> Sealer:
    """Return the sealer of a key file; an empty path makes a key of this process alone.

    Raises  ConfigError where the file cannot be read or holds too little.
    """
    if not path:
        return Sealer(os.urandom(MIN_KEY_BYTES))
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"responses_key_file={path!r} cannot be read: {error.strerror}; needed: a file with a secret; "
            "change --responses-key-file"
        ) from error
    if len(secret) < MIN_KEY_BYTES:
        raise ConfigError(
            f"responses_key_file={path!r} holds {len(secret)} bytes; allowed: {MIN_KEY_BYTES} or more; "
            "write one with: openssl rand -hex 32"
        )
    return Sealer(secret)
