"""Rules that say where a tensor of a checkpoint goes.

A rule is data: the name it has in the file, the target it fills, its logical shape, how it is stored and how it is
cut over ranks. Models write tables of rules; reader, loader, converter, inspector and synthesiser all run on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rose.kernels.formats import BF16, FP8_BLOCK, MXFP4, TensorFormat

PLAIN_DTYPES = ("BF16", "F32", "F64")
"""What a tensor without scales may be stored in (names of safetensors)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a matrix lies in a checkpoint: format, and the endings of the names of its one or two tensors."""

    format: TensorFormat
    """BF16 stands for any plain element type."""
    values_suffix: str = ""
    scales_suffix: str | None = None
    is_transposed: bool = False
    """Last two axes are [in, out] in the file; targets are always [out, in]."""

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the file of values with this logical shape."""
        if self.format is MXFP4:
            return (*shape[:-1], shape[-1] // 32, 16)
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the file of the scales."""
        return (*shape[:-2], *self.format.scale_shape(*shape[-2:]))

    @property
    def values_dtypes(self) -> tuple[str, ...]:
        """Element types that the file may declare for the values."""
        if self.format is MXFP4:
            return ("U8",)
        return ("F8_E4M3",) if self.format is FP8_BLOCK else PLAIN_DTYPES

    @property
    def scales_dtypes(self) -> tuple[str, ...]:
        """Element types that the file may declare for the scales."""
        return ("U8",) if self.format is MXFP4 else ("F32",)


PLAIN = Storage(format=BF16)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """One tensor of a checkpoint (with its scales) and the place it fills."""

    source: str
    """Name in the file, `{n}` standing for the layer; storage adds its suffixes."""
    target: str
    """Name of what is filled, `{n}` likewise; several rules with one target fill it in order of `part`."""
    role: str
    """See quant.scheme.ROLES: decides the resident format."""
    shape: tuple[int, ...]
    """Logical shape of this part, uncut: vectors [N], matrices [N, K] (out, in), stacks [E, N, K]."""
    storage: Storage = PLAIN
    part: int = 0
    num_parts: int = 1
    first_row: int = 0
    """Where this part begins in the tensor of the file (fused tensors)."""
    source_rows: int | None = None
    """Rows of that tensor; None: those of `shape`."""
    split_axis: int | None = None
    """Axis of `shape` that ranks share in equal contiguous cuts; None: every rank holds all."""
    is_first_rank_only: bool = False
    """Other ranks hold nothing (a bias that is added once, before an all-reduce)."""

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices, streamed one by one."""
        return len(self.shape) == 3

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Logical shape of the whole tensor in the file."""
        rows = self.shape[0] if self.source_rows is None else self.source_rows
        return (rows, *self.shape[1:])

    @property
    def values_name(self) -> str:
        """Name in the file of the values."""
        return self.source + self.storage.values_suffix

    @property
    def scales_name(self) -> str | None:
        """Name in the file of the scales, where there are any."""
        suffix = self.storage.scales_suffix
        return None if suffix is None else self.source + suffix

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
        """Yield name, shape and allowed element types of what must be in the file."""
        yield (
            self.values_name,
            self.storage.values_shape(self.source_shape),
            self.storage.values_dtypes,
        )
        if self.scales_name is not None:
            yield (
                self.scales_name,
                self.storage.scales_shape(self.source_shape),
                self.storage.scales_dtypes,
            )

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape held by one of `size` ranks."""
        if self.split_axis is None:
            return self.shape
        cut = list(self.shape)
        assert cut[self.split_axis] % size == 0, f"{self.source}: {cut} cannot be cut in {size}"
        cut[self.split_axis] //= size
        return tuple(cut)

    def for_layer(self, n: int) -> WeightRule:
        """Return the rule with the layer's number in its names."""
        return replace(
            self,
            source=self.source.replace("{n}", str(n)),
            target=self.target.replace("{n}", str(n)),
        )


def expand(rules: Iterable[WeightRule], num_layers: int) -> list[WeightRule]:
    """Write out the rules whose source holds `{n}`, once per layer; the others come first."""
    rules = list(rules)
    once = [rule for rule in rules if "{n}" not in rule.source]
    repeated = [rule for rule in rules if "{n}" in rule.source]
    return once + [rule.for_layer(n) for n in range(num_layers) for rule in repeated]
