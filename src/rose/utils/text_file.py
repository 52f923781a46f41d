"""Text files that a person names: read as UTF-8, whatever the locale, or refused in words."""

from __future__ import annotations

from pathlib import Path

from rose.utils.errors import RoseError


def read_text(path: Path, *, wanted: str) -> str:
    """Return the text of a file; `wanted`: what it should hold, for the message.

    Raises  RoseError where it cannot be read or is no text
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        why = str(error.strerror)
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is no UTF-8 text"
    raise RoseError(f"{path} cannot be read: {why}; needed: {wanted}; name another file")
