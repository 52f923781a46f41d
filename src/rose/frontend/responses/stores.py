"""The store that a configuration names."""

from __future__ import annotations

from rose.frontend.config import FrontendConfig
from rose.frontend.responses.file_store import FileStore
from rose.frontend.responses.store import MemoryStore, NoStore, Store, limits_of


def open_store(config: FrontendConfig) -> Store:
    """Return the store.

    Raises  ConfigError where its file cannot be opened
    """
    if config.response_store == "none":
        return NoStore()
    if config.response_store == "memory":
        return MemoryStore(limits_of(config))
    return FileStore(config.response_store, limits_of(config))
