"""What a configuration may ask of a model; asked before weights are read, and again of models made elsewhere."""

from __future__ import annotations

from rose.config.engine import EngineConfig
from rose.config.model import ModelConfig
from rose.config.parallel import ParallelConfig
from rose.utils.errors import ConfigError


def context_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Return the tokens of the longest sequence that model and configuration allow.

    Raises  ConfigError where more was asked for than the model takes
    """
    asked = config.context_tokens
    if asked is None:
        return model.context_tokens
    if asked > model.context_tokens:
        raise ConfigError(
            f"context_tokens={asked}; the model takes {model.context_tokens}; allowed: 2 to that; "
            "change context_tokens"
        )
    return asked


def require_one_device(parallel: ParallelConfig) -> None:
    """Refuse what is not built yet.

    Raises  ConfigError where more than one rank was asked for
    """
    if parallel.tp * parallel.ep * parallel.dp != 1:
        raise ConfigError(
            f"parallel sizes tp={parallel.tp}, ep={parallel.ep}, dp={parallel.dp} were asked for; this engine runs "
            "on one device; allowed: 1 each; leave out --tp, --ep and --dp"
        )
