"""The o200k_harmony vocabulary of gpt-oss with no network and no model folder.

The table and a fast encoder for ordinary text come from the package bpe-openai; the table is checked against the
published hash, and the control tokens are those of the Harmony format. Used where a folder has no tokenizer.json.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.machinery
import importlib.util
import zlib
from pathlib import Path
from typing import Any

from rose.frontend.tokenizer import ControlNames, encode_pieces, without_surrogates
from rose.utils.errors import ConfigError

PACKAGE = "bpe_openai"
TABLE_FILE = "data/o200k_base.tiktoken.gz"
TABLE_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
NUM_ORDINARY = 199998
VOCAB_SIZE = 201088
_NAMED = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
_INSTALL = "install it with: pip install 'rose-engine[vocab]'"


class O200kTokenizer:
    """o200k_harmony: ids 0 to 199997 are text, 199998 to 201087 control tokens."""

    name = "o200k_harmony"
    vocab_size = VOCAB_SIZE

    def __init__(self, *, wanted_by: str | None = None) -> None:
        folder = _find_package(wanted_by)
        self._bytes = read_table(folder / TABLE_FILE)
        self._control = ControlNames(control_tokens(), source=self.name)
        self._encoder = _load_bindings(folder).tokenizer_for_encoding("o200k_base")
        _check_encoder(self)

    def encode(self, text: str) -> list[int]:
        """Encode text as ordinary tokens."""
        return self._encoder.encode(without_surrogates(text))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, of a control token its name."""
        if 0 <= token_id < NUM_ORDINARY:
            return self._bytes[token_id]
        return (self._control.name_of(token_id) or "\ufffd").encode()

    def control_id(self, name: str) -> int:
        """Return the id of a control token."""
        return self._control.id_of(name)

    def control_name(self, token_id: int) -> str | None:
        """Return the name of a control token or None."""
        return self._control.name_of(token_id)

    def encode_with_control(self, text: str) -> list[int]:
        """Encode trusted text in which names of control tokens mean those tokens."""
        return encode_pieces(self, self._control.split(text))


def control_tokens() -> dict[str, int]:
    """Return every control token of o200k_harmony; `<|endofprompt|>` is a second name of 200018."""
    named = set(_NAMED.values())
    reserved = [i for i in range(NUM_ORDINARY, VOCAB_SIZE) if i not in named]
    tokens = _NAMED | {f"<|reserved_{i}|>": i for i in reserved}
    return tokens | {"<|endofprompt|>": 200018}


def read_table(path: Path) -> list[bytes]:
    """Return the bytes of the ordinary tokens by id, from the packed table.

    Raises   ConfigError when it is not the published one
    """
    try:
        text = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error):
        text = b""
    found = hashlib.sha256(text).hexdigest()
    if found != TABLE_SHA256:
        raise ConfigError(
            f"vocabulary {path}: sha256 {found} of {len(text)} bytes; allowed: {TABLE_SHA256}; {_INSTALL}"
        )
    return [base64.b64decode(line.partition(b" ")[0]) for line in text.splitlines()]


def _find_package(wanted_by: str | None) -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        wanted = f"model folder {wanted_by} has no tokenizer.json, so " if wanted_by else ""
        raise ConfigError(
            f"{wanted}the o200k_harmony vocabulary is needed; package bpe-openai is not installed; "
            f"{_INSTALL}, or set the model to a folder that holds tokenizer.json"
        )
    return Path(spec.submodule_search_locations[0])


def _load_bindings(folder: Path) -> Any:
    # Loaded from its file: importing the package would first build three tables in Python, 0.6 s more.
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_bindings{suffix}"
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"{PACKAGE}._bindings", path)
            assert spec is not None, f"{path} has the name of an extension module"
            assert spec.loader is not None, f"{path} has the name of an extension module"
            bindings = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(bindings)
            return bindings
    raise ConfigError(
        f"package bpe-openai in {folder} has no _bindings; allowed: 0.1.4; {_INSTALL}"
    )


def _check_encoder(tokenizer: O200kTokenizer) -> None:
    # The encoder has its own copy of the table; a wrong one would show in any text.
    probe = "I'm DON'T 12345678 naïve 😀\n\n  x"
    token_ids = tokenizer.encode(probe)
    if b"".join(map(tokenizer.token_bytes, token_ids)) != probe.encode():
        raise ConfigError(
            f"the encoder of bpe-openai does not match its table; allowed: 0.1.4; {_INSTALL}"
        )
