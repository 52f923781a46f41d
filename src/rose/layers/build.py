"""What every layer is built with: formats, ranks, device and kernel choices, in one object.

Layers bind their operations through it when they are built, so that it can print what runs where.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rose.config.engine import KernelsConfig
from rose.config.quant import QuantConfig
from rose.kernels import registry
from rose.kernels.dry import DryOperation
from rose.kernels.registry import BoundOperation, KernelRow
from rose.parallel.group import ParallelGroup
from rose.parallel.single import SingleGroup
from rose.utils.device import CPU, DeviceFacts
from rose.utils.dtypes import torch_dtype
from rose.utils.errors import InvarianceError


class LayerBuild:
    """Resolved formats, the group that shares the weights, the device, and overrides of kernels."""

    def __init__(
        self,
        *,
        quant: QuantConfig,
        group: ParallelGroup | None = None,
        device: DeviceFacts = CPU,
        kernels: KernelsConfig | None = None,
        dry_context: int | None = None,
    ) -> None:
        """Take a resolved `quant`: nothing in it is "auto".

        `dry_context`: bind, but compute nothing (`kernels.dry`); for weights without memory (torch's meta device)
        and sequences of up to so many tokens.
        Raises  ContractError where `kernels.only` names an operation that does not exist.
        """
        assert "auto" not in (quant.activations, quant.kv), "quant must be resolved first"
        self.quant = quant
        self.group = group or SingleGroup()
        self.device = device
        self.kernels = kernels or KernelsConfig()
        self._dry_context = dry_context
        self._dry_bytes: dict[tuple[Any, ...], int] = {}
        self._not_invariant: dict[str, None] = {}
        registry.require_operations(self.kernels.only)
        self.weight_bytes = 0
        """Held by all layers built so far, relayouts included."""
        self._table: dict[KernelRow, None] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return torch_dtype(self.quant.activations)

    def bind(
        self, name: str, *, sizes: Mapping[str, int], weight: str | None = None
    ) -> BoundOperation:
        """Choose the kernels of an operation for these sizes; `weight` names its weights' format."""
        weights = {} if weight is None else {"weight": weight}
        return self._entered(self._bound(name, weights, sizes))

    def bind_fusion(
        self, name: str, *, sizes: Mapping[str, int], weights: Mapping[str, str]
    ) -> BoundOperation | None:
        """Choose the kernel of a fusion; None where its parts run instead, which the table then says.

        `weights`: operand -> format. In the batch-invariant mode the parts run, unless `kernels.only` asks for a
        kernel: that is refused as any other would be.
        Units   the fusion is bound for one regime
        """
        asked = self.kernels.only.get(name)
        unfused = next(i for i in registry.implementations(name) if i.is_unfused)
        if self.kernels.batch_invariant and asked in (None, unfused.name):
            [regime] = registry.load(name).regimes
            self._table[KernelRow(name, regime, unfused.name, is_unfused=True)] = None
            return None
        bound = self._entered(self._bound(name, weights, sizes))
        [chosen] = bound.table.values()
        return None if chosen.is_unfused else bound

    def _entered(self, bound: BoundOperation) -> BoundOperation:
        """Write a bound operation into the table and begin what is slow; return what is called."""
        new_rows = dict.fromkeys(bound.rows())
        is_new = not new_rows.keys() <= self._table.keys()
        if is_new and self.device.kind == "cuda" and torch.cuda.is_available():
            # nvcc takes 5 to 20 s a source; weights are read and other layers built in the meantime.
            registry.begin_compiling(bound)
        self._table.update(new_rows)
        if self._dry_context is None:
            return bound
        return DryOperation(bound, self._dry_context, self._dry_bytes)

    def _bound(
        self, name: str, weights: Mapping[str, str], sizes: Mapping[str, int]
    ) -> BoundOperation:
        formats = {"activation": self.quant.activations, "kv": self.quant.kv, **weights}

        def bind(*, batch_invariant: bool) -> BoundOperation:
            return registry.bind(
                name,
                formats=formats,
                sizes=sizes,
                device=self.device,
                only=self.kernels.only,
                check_calls=self.kernels.check_calls,
                batch_invariant=batch_invariant,
                asks_device=self._dry_context is None,
            )

        try:
            return bind(batch_invariant=bool(self.kernels.batch_invariant))
        except registry.NotInvariant:
            if self._dry_context is None:
                raise
            # A dry model is built to the end, so that the refusal names every operation.
            self._not_invariant[name] = None
            return bind(batch_invariant=False)

    def require_invariant(self) -> None:
        """Refuse the batch-invariant mode where an operation of the (dry) model cannot follow it.

        Raises  InvarianceError naming all of them
        """
        if self._not_invariant:
            activations = self.quant.activations
            # Where an operation has been told its implementation, another machine would not help.
            named = [
                f"{n}={self.kernels.only[n]}" for n in self._not_invariant if n in self.kernels.only
            ]
            without = f" and without kernels.only {', '.join(named)}" if named else ""
            raise InvarianceError(
                f"kernels.batch_invariant was asked for on {self.device.name} with {activations} activations; there "
                f"{', '.join(self._not_invariant)} have no implementation yet whose results do not depend on the "
                f"batch; allowed: a CPU with float32 or bf16 activations{without}; change kernels.batch_invariant to "
                "off"
            )

    def kernel_table(self) -> list[KernelRow]:
        """Return lines for the start-up table: everything bound, without repeats."""
        return list(self._table)
