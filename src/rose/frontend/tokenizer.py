"""Text to token ids and back, for the frontend only; the engine knows no text.

A tokenizer is read from a model folder's `tokenizer.json`, or, for folders without one, built from the published
o200k table (`o200k.py`). Text never becomes a control token here: control tokens are asked for by name. Knows no
prompt format.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

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
    """A byte-level BPE tokenizer read from `tokenizer.json`.

    The control tokens are taken out of the encoder altogether, so that no text can reach them.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers  # here, so that folders without tokenizer.json do without the library

        self.name = str(path)
        spec = _read_spec(path)
        control, self._bytes = _take_out_control(spec)
        self._control = ControlNames(control, source=str(path))
        _check_bytes_complete(spec, path)
        self.vocab_size = max([*control.values(), *self._bytes]) + 1
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self._encoder.no_truncation()
        self._encoder.no_padding()

    def encode(self, text: str) -> list[int]:
        """Encode text as ordinary tokens."""
        return self._encoder.encode(without_surrogates(text), add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, of a control token its name."""
        name = self._control.name_of(token_id)
        return name.encode() if name else self._bytes.get(token_id, _UNKNOWN_ID_BYTES)

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

    def push(self, piece: bytes) -> str:
        """Take bytes; return the text that is complete."""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return what was held back (U+FFFD, or nothing) and begin anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


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


def _read_spec(path: Path) -> dict[str, Any]:
    try:
        spec = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"tokenizer {path} cannot be read: {error}; copy the file anew"
        ) from None
    model = spec.get("model") if isinstance(spec, dict) else None
    found = model.get("type") if isinstance(model, dict) else None
    if found != "BPE" or "ByteLevel" not in json.dumps(spec.get("decoder")):
        raise CheckpointError(
            f"tokenizer {path}: model {found}, decoder {json.dumps(spec.get('decoder'))[:80]}; "
            "allowed: BPE with a ByteLevel decoder, as gpt-oss has; use the tokenizer.json of the model"
            if isinstance(spec, dict)
            else f"tokenizer {path} holds no JSON object; copy the file anew"
        )
    return spec


def _take_out_control(spec: dict[str, Any]) -> tuple[dict[str, int], dict[int, bytes]]:
    """Remove the control tokens from a tokenizer.json; return them and the bytes of every other token."""
    added: list[dict[str, Any]] = spec.get("added_tokens") or []
    is_control = [bool(t.get("special")) or _looks_like_control(t["content"]) for t in added]
    control = {
        t["content"]: t["id"] for t, control in zip(added, is_control, strict=True) if control
    }
    spec["added_tokens"] = [t for t, control in zip(added, is_control, strict=True) if not control]
    spec["post_processor"] = None  # it may name control tokens, and formatters add their own
    vocab: dict[str, int] = spec["model"]["vocab"]
    for name in control:
        vocab.pop(name, None)
    token_bytes = {
        token_id: bytes(map(_BYTE_OF.__getitem__, text))
        for text, token_id in vocab.items()
        if _BYTE_OF.keys() >= set(text)
    }
    token_bytes |= {t["id"]: t["content"].encode() for t in spec["added_tokens"]}
    return control, token_bytes


def _looks_like_control(text: str) -> bool:
    return text.startswith("<|") and text.endswith("|>")


def _check_bytes_complete(spec: dict[str, Any], path: Path) -> None:
    missing = [byte for char, byte in _BYTE_OF.items() if char not in spec["model"]["vocab"]]
    if missing:
        raise CheckpointError(
            f"tokenizer {path} has no token for {len(missing)} of the 256 bytes (first: {missing[0]:#04x}), "
            "so some text would vanish; train it with the whole byte alphabet"
        )


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
