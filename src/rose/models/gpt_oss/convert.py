"""`rose convert` for gpt-oss: the tables of `weights.py` handed to the converter and the verifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rose.models.gpt_oss import hugging_face
from rose.models.gpt_oss.config import GptOssConfig
from rose.models.gpt_oss.weights import Layout, detect, read_config, rules
from rose.utils.errors import CheckpointError
from rose.weights import convert as converter
from rose.weights.loader import Progress, ignore_progress
from rose.weights.reader import CheckpointReader, config_path, read_json
from rose.weights.verify import TensorReport, verify
from rose.weights.writer import write_json

TARGET_LAYOUTS = {
    "mxfp4": Layout(naming="hugging_face", experts="mxfp4"),
    "bf16": Layout(naming="hugging_face", experts="bf16"),
    "fp8_block": Layout(naming="hugging_face", experts="fp8_block"),
    "fp8_block_all": Layout(naming="hugging_face", experts="fp8_block", has_fp8_projections=True),
}
"""Formats that can be written, all with Hugging Face names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion did."""

    source: Layout
    num_bytes: int
    num_shards: int
    kept_shards: tuple[str, ...]
    """Files found finished and intact from an earlier, interrupted run."""
    companions: tuple[str, ...]


def convert(
    source: Path,
    folder: Path,
    format_name: str,
    *,
    device: str = "cpu",
    shard_bytes: int = converter.SHARD_BYTES,
    progress: Progress = ignore_progress,
) -> Converted:
    """Write `source` into `folder` in another format; run again after a kill, it goes on.

    Raises  CheckpointError
    """
    layout_out = _target_layout(format_name)
    with CheckpointReader(source) as reader:
        config = read_config(source)
        layout = detect(reader)
        conversion = converter.plan(
            reader,
            folder,
            source_rules=rules(config, layout),
            target_rules=rules(config, layout_out),
            format_name=format_name,
            shard_bytes=shard_bytes,
        )
        with converter.alone(conversion):
            kept = converter.run(conversion, device=device, progress=progress)
            companions = converter.copy_companions(reader.folder, folder)
            _write_configuration(source, folder, config, format_name)
            converter.close(conversion)
    return Converted(
        source=layout,
        num_bytes=sum(shard.num_bytes for shard in conversion.shards),
        num_shards=len(conversion.shards),
        kept_shards=tuple(kept),
        companions=tuple(companions),
    )


def verify_copy(
    source: Path,
    folder: Path,
    *,
    device: str = "cpu",
    progress: Progress = ignore_progress,
) -> list[TensorReport]:
    """Compare a converted checkpoint with its source, tensor by tensor.

    Raises  CheckpointError
    """
    config = read_config(source)
    with CheckpointReader(source) as original, CheckpointReader(folder) as copy:
        return verify(
            original,
            rules(config, detect(original)),
            copy,
            rules(config, detect(copy)),
            device=device,
            progress=progress,
        )


def _target_layout(format_name: str) -> Layout:
    if format_name not in TARGET_LAYOUTS:
        raise CheckpointError(
            f"format {format_name!r} is not known; allowed: {', '.join(TARGET_LAYOUTS)}; change --format"
        )
    return TARGET_LAYOUTS[format_name]


def _write_configuration(
    source: Path, folder: Path, config: GptOssConfig, format_name: str
) -> None:
    """Write config.json and, where the source has none, generation_config.json."""
    values = read_json(config_path(source))
    if "model_type" not in values:  # the original layout names things otherwise
        values = hugging_face.config_json(config)
    write_json(folder / "config.json", hugging_face.with_quantization(values, format_name))
    if not (folder / "generation_config.json").exists():
        write_json(folder / "generation_config.json", hugging_face.generation_json(config))
