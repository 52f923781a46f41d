"""What a full page of KV is called: the key of the page before it and its own tokens, hashed.

Equal keys mean equal tokens from the first position on and the same salt, so KV of one may stand for the other.
Knows tokens and no pages.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

KEY_BYTES = 16
"""128 bits of a cryptographic hash: nobody can build a prompt that is taken for another one's."""
_TOKEN_BYTES = 4


class PageKeys:
    """The keys of one sequence's pages, computed as far as somebody asked; they outlive a preemption."""

    __slots__ = ("_keys", "_salt")

    def __init__(self, salt: str) -> None:
        self._salt = salt
        self._keys: list[bytes] = []

    def up_to(self, num_pages: int, token_ids: list[int], page_tokens: int) -> list[bytes]:
        """Return at least the keys of the first `num_pages` pages, which the known tokens fill.

        Aliasing  the list grows with later calls
        """
        keys = self._keys
        if len(keys) >= num_pages:
            return keys
        # A fixed-size root, so that no salt can be continued by tokens.
        key = (
            keys[-1]
            if keys
            else blake2b(
                self._salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES
            ).digest()
        )
        tokens = array("I", token_ids[len(keys) * page_tokens : num_pages * page_tokens]).tobytes()
        size = page_tokens * _TOKEN_BYTES
        for start in range(0, len(tokens), size):
            key = blake2b(key + tokens[start : start + size], digest_size=KEY_BYTES).digest()
            keys.append(key)
        return keys
