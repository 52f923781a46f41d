"""The grammar library, narrowed to what the engine needs: a vocabulary, a grammar, and the bits of what may come next.

llguidance is imported when a vocabulary arrives, so that an engine whose clients want no grammars does without it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from rose.protocol.grammar import Vocabulary
from rose.utils.errors import RoseError
from rose.utils.math import ceil_div

CACHED_GRAMMARS = 128
"""Built grammars kept, least recently used given up first."""
MAX_MESSAGE = 300
"""Characters of the library's words that reach a client."""
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 500_000,
    "step_max_items": 100_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""Work that one grammar may cost: by the library's own figures 20 ms to build, 40 ms and 5 ms a step at the very worst
(regular expressions, productions), and 200 MB of states."""


class GrammarError(RoseError):
    """A grammar that cannot be built or followed; the message is written for the client."""


class TokenTrie:
    """A vocabulary as the library holds it, and the grammars built for it; `prepare` and `matcher` from any thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._num_tokens = min(len(vocabulary.tokens), vocab_size)
        """Ids past the model's vocabulary are never sampled, so no grammar may count on them."""
        self._tokens: Any = None
        self._problem: str | None = None
        self._grammars: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._last_banned: tuple[tuple[int, ...] | None, bytes] = (None, b"")

    @property
    def mask_bytes(self) -> int:
        """Size of a mask: whole 32-bit words."""
        return 4 * ceil_div(self._num_tokens, 32)

    def build(self) -> None:
        """Build the trie; what fails is told to the first request that needs it."""
        try:
            from llguidance import LLTokenizer

            source = _Source(self._vocabulary, self._num_tokens)
            self._tokens = LLTokenizer(source, n_vocab=self._num_tokens)  # pyright: ignore[reportArgumentType]
            source.trie = self._tokens
        except Exception as error:  # noqa: BLE001 - answered to each client that needs it
            self._problem = f"{type(error).__name__}: {error}"

    def all_but(self, banned_ids: list[int]) -> bytes:
        """Return the mask of everything else."""
        key = tuple(banned_ids)
        if self._last_banned[0] != key:
            self._last_banned = key, self._all_but(banned_ids)
        return self._last_banned[1]

    def _all_but(self, banned_ids: list[int]) -> bytes:
        mask = bytearray(b"\xff" * self.mask_bytes)
        for token_id in banned_ids:
            if token_id < self._num_tokens:
                mask[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(mask)

    def prepare(self, text: str) -> None:
        """Build a grammar, or find it built.

        Raises  GrammarError with the library's words
        """
        self._built(text)

    def matcher(self, text: str) -> Matcher:
        """Return a matcher at the beginning of a grammar.

        Raises  GrammarError
        """
        return Matcher(self._built(text).deep_copy(), self.mask_bytes)

    def _built(self, text: str) -> Any:
        with self._lock:
            found = self._grammars.get(text)
            if found is not None:
                self._grammars.move_to_end(text)
                return found
        found = self._build_grammar(text)
        with self._lock:
            self._grammars[text] = found
            while len(self._grammars) > CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        return found

    def _build_grammar(self, text: str) -> Any:
        if self._tokens is None:
            raise GrammarError(
                f"the engine cannot read the vocabulary of this server: {self._problem}"
            )
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(
            self._tokens,
            LLMatcher.grammar_from_lark(text),
            log_level=0,
            limits=LLParserLimits(**LIMITS),  # pyright: ignore[reportArgumentType]
        )
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be built: {_short(matcher.get_error())}")
        return matcher


class Matcher:
    """One place in one grammar; for one thread at a time."""

    def __init__(self, matcher: Any, mask_bytes: int) -> None:
        self.library = matcher
        self.mask_bytes = mask_bytes

    @property
    def is_complete(self) -> bool:
        """Whether nothing more may come."""
        return self.library.is_stopped() and not self.library.is_error()

    def take(self, token_id: int) -> None:
        """Go on by a token.

        Raises  GrammarError for one that the grammar does not allow
        """
        if not self.library.consume_token(token_id):
            raise GrammarError(f"token {token_id} was sampled and not taken: {self._problem()}")

    def mask(self) -> bytes:
        """Return the packed bits of the tokens that may come next.

        Raises  GrammarError where the library gives up, or nothing may come next
        """
        return self.checked(self.library.compute_bitmask())

    def checked(self, mask: bytes) -> bytes:
        """Return a mask that the library computed.

        Raises  GrammarError as `mask` does
        """
        if self.library.is_error():
            raise GrammarError(f"the grammar cannot be followed: {self._problem()}")
        if mask == bytes(self.mask_bytes):
            raise GrammarError(
                "no token of the vocabulary may come next by the grammar; change the schema"
            )
        return mask

    def _problem(self) -> str:
        return _short(self.library.get_error())


def masks(matchers: list[Matcher], executor: Any = None) -> list[bytes | Exception]:
    """Return the masks of matchers with masks of one size, or why one has none.

    Units    executor: computes several side by side, on threads of the library
    """
    if executor is None:
        return [_tried(matcher.mask) for matcher in matchers]
    size = matchers[0].mask_bytes
    buffer = bytearray(size * len(matchers))
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    pairs = [(matcher.library, i) for i, matcher in enumerate(matchers)]
    executor.unsafe_compute_mask_ptr(pairs, address, size, len(matchers))
    parts = [bytes(buffer[i * size : (i + 1) * size]) for i in range(len(matchers))]
    return [
        _tried(lambda m=matcher, p=part: m.checked(p))
        for matcher, part in zip(matchers, parts, strict=True)
    ]


def _tried(function: Callable[[], bytes]) -> bytes | Exception:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - each is answered to its own client
        return error


class _Source:
    """A vocabulary as `LLTokenizer` asks for it."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, num_tokens: int) -> None:
        self.tokens = vocabulary.tokens[:num_tokens]
        self.special_token_ids = [i for i in vocabulary.control_ids if i < num_tokens]
        self.eos_token_id = vocabulary.end_id
        self.trie: Any = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Cut text that is certain to come into tokens, longest first: the engine has no tokenizer."""
        if self.trie is None:
            return []
        return self.trie.greedy_tokenize(text if isinstance(text, str) else text.decode())


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."
