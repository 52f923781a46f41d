"""`rose convert`: write a checkpoint in another format, resumable, and verify the copy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rose.cli.options import Number

if TYPE_CHECKING:
    from rose.weights.verify import TensorReport

EXIT_NOT_AS_PROMISED = 1


@click.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_name",
    required=True,
    help="fp8_block (experts), fp8_block_all (projections and head too), bf16 or mxfp4.",
)
@click.option("--verify", "is_verified", is_flag=True, help="Read the copy again and compare.")
@click.option("--device", default="cpu", show_default=True, help="Where numbers are converted.")
@click.option(
    "--shard-gb",
    type=Number(min=0.001),
    default=4.5,
    show_default=True,
    help="Largest file, in 10^9 bytes.",
)
def convert(
    source: Path, folder: Path, format_name: str, is_verified: bool, device: str, shard_gb: float
) -> int:
    """Convert checkpoint SRC (Hugging Face or original layout) into folder DST.

    Interrupted? Run the same command again: finished files are checked and kept.
    """
    from rose.cli.byte_progress import byte_progress
    from rose.runtime.load import find_architecture
    from rose.utils.device import detect
    from rose.weights.folders import gib

    converter = find_architecture(source).module("convert")
    kind = detect(device).kind
    start = time.monotonic()
    with byte_progress("converting") as progress:
        done = converter.convert(
            source,
            folder,
            format_name,
            device=kind,
            shard_bytes=int(shard_gb * 1e9),
            progress=progress,
        )
    kept = f", {len(done.kept_shards)} kept from before" if done.kept_shards else ""
    click.echo(
        f"{folder}: {done.source.naming} {done.source.format} to {format_name}, {gib(done.num_bytes)} in "
        f"{done.num_shards} files{kept}, {time.monotonic() - start:.1f} s, "
        f"peak memory {gib(peak_resident_bytes())}"
    )
    if not is_verified:
        return 0
    with byte_progress("verifying") as progress:
        reports = converter.verify_copy(source, folder, device=kind, progress=progress)
    return print_reports(reports)


def peak_resident_bytes() -> int:
    """Return the most memory this process has had resident."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def print_reports(reports: list[TensorReport]) -> int:
    """Print a line per tensor that was re-encoded or differs, then the sum; returns the exit code."""
    for report in reports:
        if report.is_exact and report.source_format == report.target_format:
            continue
        span = "" if report.span is None else f", exponent span {report.span}"
        wide = f", {report.num_wide_tiles} tiles over 14" if report.num_wide_tiles else ""
        verdict = "bit-exact" if report.is_exact else f"largest error {report.largest_error:.3g}"
        click.echo(
            f"{report.name}: {report.source_format} to {report.target_format}: {verdict} "
            f"(largest magnitude {report.largest_magnitude:.3g}{span}{wide})"
        )
    exact = sum(report.is_exact for report in reports)
    spans = [report.span for report in reports if report.span is not None]
    span = f"; largest exponent span {max(spans)}" if spans else ""
    error = max((report.largest_error for report in reports), default=0.0)
    click.echo(
        f"verified: {exact} of {len(reports)} tensors bit-exact; largest error {error:.3g}{span}"
    )
    broken = [report.name for report in reports if not report.is_as_promised]
    for name in broken:
        click.echo(f"error: {name} should be bit-exact and is not; convert again", err=True)
    return EXIT_NOT_AS_PROMISED if broken else 0
