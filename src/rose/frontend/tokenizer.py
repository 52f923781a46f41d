"""Text to token ids and back, for the frontend only; the engine knows no text.

A tokenizer is read from a model folder's `tokenizer.json`, or, for folders without one, built from the published
o200k table (`o200k.py`). Text never becomes a control token here: control tokens are asked for by name. Knows no
prompt format.
"""

from __future__ import annotations

import codecs
import json
import re
import weakref
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rose.protocol.grammar import Vocabulary, vocabulary_key
from rose.utils.errors import CheckpointError, ConfigError

TOKENIZER_FILE = "tokenizer.json"
_UNKNOWN_ID_BYTES = "\ufffd".encode()


class Tokenizer(Protocol):
    """What formatters need of a vocabulary."""

    name: str
    vocab_size: int
    """One more than the largest id."""

    def encode(self, text: str) -> list[int]:
        """Encode text as ordinary tokens; what looks like a control token stays text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token: of a control token its name, of an unknown id those of U+FFFD."""
        ...

    def control_id(self, name: str) -> int:
        """Return the id of a control token such as `<|start|>`.

        Raises   CheckpointError when the vocabulary has none of that name
        """
        ...

    def control_name(self, token_id: int) -> str | None:
        """Return the name of a control token, None for ordinary tokens and unknown ids."""
        ...

    def encode_with_control(self, text: str) -> list[int]:
        """Encode trusted text in which names of control tokens mean those tokens (scripts, tests)."""
        ...


class ControlNames:
    """The control tokens of a vocabulary, by name and by id."""

    def __init__(self, ids: dict[str, int], *, source: str) -> None:
        self._ids = ids
        self._names = {token_id: name for name, token_id in reversed(ids.items())}
        self._source = source
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if ids else None

    @property
    def names(self) -> Collection[str]:
        """Return every name."""
        return self._ids.keys()

    def id_of(self, name: str) -> int:
        """Return the id of a name; raises CheckpointError when there is none."""
        if name not in self._ids:
            shown = ", ".join(list(self._ids)[:12]) or "none"
            raise CheckpointError(
                f"control token {name} is needed; {self._source} has: {shown}; "
                "use a tokenizer.json that lists it under added_tokens"
            )
        return self._ids[name]

    def name_of(self, token_id: int) -> str | None:
        """Return the name of an id, None when it is no control token."""
        return self._names.get(token_id)

    def split(self, text: str) -> Iterable[tuple[str, int | None]]:
        """Yield the pieces of text: (text, None) or (name, id of that control token)."""
        place = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            yield text[place : match.start()], None
            yield match.group(), self._ids[match.group()]
            place = match.end()
        yield text[place:], None


class FolderTokenizer:
    """A byte-level BPE tokenizer read from `tokenizer.json`; no text can reach its control tokens."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        encoder = _read_encoder(path)
        control, self._added = _added_tokens(encoder)
        self._control = ControlNames(control, source=str(path))
        self.vocab_size = max(encoder.get_vocab().values()) + 1
        self._token_of = encoder.id_to_token
        self._encoder = _without_control(encoder, self._control)
        self._bytes: dict[
            int, bytes
        ] = {}  # filled as tokens are met; a whole table would take a second

    def encode(self, text: str) -> list[int]:
        """Encode text as ordinary tokens."""
        return self._encoder.encode(without_surrogates(text), add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, of a control token its name."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._find_bytes(token_id)
            if 0 <= token_id < self.vocab_size:
                self._bytes[token_id] = found
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        name = self._control.name_of(token_id) or self._added.get(token_id)
        if name is not None:
            return name.encode()
        text = self._token_of(token_id) if 0 <= token_id < self.vocab_size else None
        if text is None or not _BYTE_OF.keys() >= set(text):
            return _UNKNOWN_ID_BYTES
        return bytes(map(_BYTE_OF.__getitem__, text))

    def control_id(self, name: str) -> int:
        """Return the id of a control token."""
        return self._control.id_of(name)

    def control_name(self, token_id: int) -> str | None:
        """Return the name of a control token or None."""
        return self._control.name_of(token_id)

    def encode_with_control(self, text: str) -> list[int]:
        """Encode trusted text in which names of control tokens mean those tokens."""
        return encode_pieces(self, self._control.split(text))


class TextDecoder:
    """Bytes to text, any number at a time; an incomplete character is held back, a broken one is U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_inside = False
        """Whether a character has begun and not ended."""

    def push(self, piece: bytes) -> str:
        """Take bytes; return the text that is complete."""
        text = self._decoder.decode(piece)
        self.is_inside = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return what was held back (U+FFFD, or nothing) and begin anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self.is_inside = False
        return rest


class PlainTexts(dict[int, str]):
    """Texts of ordinary tokens that are whole characters, empty for all others; filled as tokens are met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = weakref.ref(tokenizer)

    def of(self, token_ids: Iterable[int]) -> list[str]:
        """Return the texts of the tokens before the first that has none."""
        texts: list[str] = []
        for token_id in token_ids:  # a third of the time that takewhile needs for one token
            text = self[token_id]
            if not text:
                break
            texts.append(text)
        return texts

    def __missing__(self, token_id: int) -> str:
        """Return the text of a token that was not met before."""
        tokenizer = self._tokenizer()
        assert tokenizer is not None, "who asks has it"
        text = ""
        if tokenizer.control_name(token_id) is None:
            try:
                text = tokenizer.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = ""  # a part of a character
        if 0 <= token_id < tokenizer.vocab_size:  # no more entries than there are tokens
            self[token_id] = text
        return text


_plain_texts: weakref.WeakKeyDictionary[Tokenizer, PlainTexts] = weakref.WeakKeyDictionary()


def plain_texts(tokenizer: Tokenizer) -> PlainTexts:
    """Return the texts of a vocabulary, the same for all who ask."""
    found = _plain_texts.get(tokenizer)
    if found is None:
        found = _plain_texts[tokenizer] = PlainTexts(tokenizer)
    return found


def load_tokenizer(folder: str | Path | None) -> Tokenizer:
    """Return the tokenizer of a model folder: its tokenizer.json, else the o200k_harmony vocabulary.

    Raises   ConfigError or CheckpointError that names the file and the extra to install
    """
    if folder is not None:
        path = Path(folder)
        if not path.is_dir():
            raise ConfigError(f"model folder {path}: no such folder; give one that holds a model")
        if (path / TOKENIZER_FILE).exists():
            return FolderTokenizer(path / TOKENIZER_FILE)
    from rose.frontend.o200k import O200kTokenizer

    return O200kTokenizer(wanted_by=str(folder) if folder is not None else None)


def decode(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """Return the text of tokens, control tokens by name, broken characters as U+FFFD."""
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode("utf-8", "replace")


def control_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of all control tokens, in order."""
    return [i for i in range(tokenizer.vocab_size) if tokenizer.control_name(i) is not None]


def vocabulary(tokenizer: Tokenizer, *, end_name: str) -> Vocabulary:
    """Return what the engine needs of a tokenizer for grammars; ids without a text have no bytes."""
    control = control_ids(tokenizer)
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    tokens = [b"" if token == _UNKNOWN_ID_BYTES else token for token in tokens]
    end_id = tokenizer.control_id(end_name)
    return Vocabulary(
        key=vocabulary_key(tokens, control, end_id),
        tokens=tokens,
        control_ids=control,
        end_id=end_id,
    )


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 cannot, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[tuple[str, int | None]]) -> list[int]:
    """Encode what `ControlNames.split` yields."""
    token_ids: list[int] = []
    for text, control_id in pieces:
        token_ids.extend(tokenizer.encode(text) if control_id is None else [control_id])
    return token_ids


def _read_encoder(path: Path) -> Any:
    import tokenizers  # here, so that folders without tokenizer.json do without the library

    try:
        encoder = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise CheckpointError(
            f"tokenizer {path} cannot be read: {error}; copy the file anew"
        ) from None
    decoder = encoder.decoder.__getstate__().decode() if encoder.decoder is not None else "none"
    model = type(encoder.model).__name__
    if model != "BPE" or "ByteLevel" not in decoder:
        raise CheckpointError(
            f"tokenizer {path}: model {model}, decoder {decoder[:80]}; allowed: BPE with a ByteLevel "
            "decoder, as gpt-oss has; use the tokenizer.json of the model"
        )
    missing = [byte for char, byte in _BYTE_OF.items() if encoder.token_to_id(char) is None]
    if missing:
        raise CheckpointError(
            f"tokenizer {path} has no token for {len(missing)} of the 256 bytes (first: {missing[0]:#04x}), "
            "so some text would vanish; train it with the whole byte alphabet"
        )
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _added_tokens(encoder: Any) -> tuple[dict[str, int], dict[int, str]]:
    """Return the control tokens by name, and the words that were added as ordinary tokens by id."""
    added = encoder.get_added_tokens_decoder()
    control = {
        t.content: i for i, t in added.items() if t.special or _looks_like_control(t.content)
    }
    ordinary = {i: t.content for i, t in added.items() if t.content not in control}
    return control, ordinary


def _looks_like_control(text: str) -> bool:
    return text.startswith("<|") and text.endswith("|>")


def _without_control(encoder: Any, control: ControlNames) -> Any:
    """Return an encoder whose output holds no control token, whatever the text."""
    encoder.encode_special_tokens = True
    probe = "\n".join(control.names)
    texts = [*control.names, probe]
    encoded = encoder.encode_batch(texts, add_special_tokens=False)
    if not any(control.name_of(i) for line in encoded for i in line.ids):
        return encoder
    # Control tokens that are not marked special, or that the merges reach: rebuild without them (slow, rare).
    import tokenizers

    spec = json.loads(encoder.to_str())
    spec["post_processor"] = None  # it may name what is taken out
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in control.names]
    for name in control.names:
        spec["model"]["vocab"].pop(name, None)
    merges = spec["model"]["merges"]
    spec["model"]["merges"] = [
        m for m in merges if "".join(m).replace(" ", "") not in control.names
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _byte_alphabet() -> dict[str, int]:
    """Return the characters by which byte-level BPE files write bytes.

    Source   GPT-2's byte-to-unicode table: printable bytes stand for themselves, the others follow from U+0100
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def token_ids_of(value: Sequence[Any]) -> list[int] | None:
    """Return a JSON list as token ids, or None when it holds anything but whole numbers from 0."""
    is_ids = all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
    return list(value) if is_ids else None
