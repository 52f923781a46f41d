"""`rose synth` for gpt-oss: configurations of the published sizes and a tiny one, written as checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rose.models.gpt_oss import hugging_face
from rose.models.gpt_oss.config import GptOssConfig, published, tiny
from rose.models.gpt_oss.weights import Layout, rules
from rose.utils.errors import ConfigError
from rose.weights import synth as synthesiser
from rose.weights.loader import Progress, ignore_progress
from rose.weights.writer import Shard, write_json

SIZES = ("20b", "120b", "tiny")
_LEAST_SHARDS = 2.5


def configuration(size: str, *, num_layers: int | None = None) -> GptOssConfig:
    """Return the configuration of a size, with fewer layers where asked.

    Raises  ConfigError
    """
    if size not in SIZES:
        raise ConfigError(f"size {size!r} is not known; allowed: {', '.join(SIZES)}; change --size")
    config = tiny() if size == "tiny" else published(size)
    if num_layers is None:
        return config
    if not 1 <= num_layers <= config.num_layers:
        raise ConfigError(
            f"layers={num_layers} was asked of {size}, which has {config.num_layers}; "
            f"allowed: 1 to {config.num_layers}; change --layers"
        )
    return replace(config, num_layers=num_layers, window_tokens=config.window_tokens[:num_layers])


def synthesise(
    folder: Path,
    config: GptOssConfig,
    *,
    seed: int = 0,
    format_name: str = "mxfp4",
    progress: Progress = ignore_progress,
) -> list[Shard]:
    """Write a synthetic checkpoint in the published layout (MXFP4) or expanded (bf16).

    Raises  CheckpointError, ConfigError
    """
    if format_name not in ("mxfp4", "bf16"):
        raise ConfigError(
            f"a synthetic checkpoint in {format_name!r} was asked for; allowed: mxfp4, bf16; change --format "
            "or convert it afterwards"
        )
    table = rules(config, Layout(naming="hugging_face", experts=format_name))
    num_bytes = sum(s.num_bytes for s in synthesiser.published_shards(table, 1 << 60))
    # Small ones come in several files too, so that they exercise what the real ones do.
    shard_bytes = min(synthesiser.SHARD_BYTES, int(num_bytes / _LEAST_SHARDS))
    shards = synthesiser.synthesise(
        folder, table, seed=seed, shard_bytes=shard_bytes, progress=progress
    )
    described = hugging_face.with_quantization(hugging_face.config_json(config), format_name)
    write_json(folder / "config.json", described)
    write_json(folder / "generation_config.json", hugging_face.generation_json(config))
    return shards
