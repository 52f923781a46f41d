"""Batches on the device: as they are drawn, or in tensors that stay, which a recorded step reads on every replay.

The learnt places of a batch vary in number. What stays has room for a bound of them; the rest of that room has weight
zero, so that loss and gradients are those of the batch. A batch with more does not fit, and is told.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from packing import ENGLISH, Batch
from torch import Tensor
from trainable import block_lists, block_mask_of

ENGLISH_WEIGHT = 0.25
"""Of a token of English: its loss is twenty times that of a question's, and hardly falls any more."""
LEARNT_SHARE = 0.4
"""Of a batch's places, those that there is room for. 12 short rows of 4,096 learn 29 % of theirs, and 38 % in the
worst of a million draws of 12 out of 630 such rows; room that is not used costs a product with the output head."""


@dataclass
class Tensors:
    """A batch of B rows and T places, and the flat places whose next token is learnt.

    Shapes   all_tokens int64 [B, T + 1]; positions int64 [B, T]; docs int32 [B, T]; places and next_one int64 [N],
             weights float32 [N]; the same of the token after the next [M]
    """

    all_tokens: Tensor
    positions: Tensor
    docs: Tensor
    places: Tensor
    next_one: Tensor
    weights: Tensor
    places_of_two: Tensor
    next_two: Tensor
    weights_of_two: Tensor
    block_masks: dict[int | None, object] | None = None
    """Of flex attention, by window; None: made on the device."""

    @property
    def tokens(self) -> Tensor:
        """Tokens that are read, [B, T]."""
        return self.all_tokens[:, :-1]


def arrays_of(drawn: Batch) -> dict[str, np.ndarray]:
    """Return what `Tensors` holds, as arrays. Chosen on the host: a device that had to count would make it wait."""
    tokens, docs, learnt = drawn.tokens, drawn.docs, drawn.is_learnt
    next_one = (learnt[:, 1:] > 0) & (docs[:, 1:] == docs[:, :-1])
    next_two = next_one.copy()
    next_two[:, :-1] = (learnt[:, 2:] > 0) & (docs[:, 2:] == docs[:, :-2])
    next_two[:, -1] = False
    weight = np.where(learnt == ENGLISH, ENGLISH_WEIGHT, 1.0).astype("float32")
    return {
        "all_tokens": tokens.astype("int64"),
        "positions": drawn.positions[:, :-1].astype("int64"),
        "docs": docs[:, :-1].astype("int32"),
        "places": next_one.reshape(-1).nonzero()[0],
        "next_one": tokens[:, 1:][next_one].astype("int64"),
        "weights": weight[:, 1:][next_one],
        "places_of_two": next_two.reshape(-1).nonzero()[0],
        "next_two": tokens[:, 2:][next_two[:, :-1]].astype("int64"),
        "weights_of_two": weight[:, 2:][next_two[:, :-1]],
    }


def on_device(drawn: Batch, device: str) -> Tensors:
    """Return a batch as it is drawn."""
    there: dict[str, Any] = {
        name: _staged(torch.from_numpy(array), device).to(device, non_blocking=True)
        for name, array in arrays_of(drawn).items()
    }
    return Tensors(**there)


def _staged(tensor: Tensor, device: str) -> Tensor:
    """Return memory that the device copies from while the host goes on."""
    return tensor if device == "cpu" else tensor.pin_memory()


class Fixed:
    """A batch in tensors that stay where they are.

    HAZARD: `fill` writes what a replay that is under way may still read. On a device both are work of one stream, which
    does them in order; the pinned copies belong to torch's allocator, which gives them out again when they were read.
    """

    def __init__(
        self, shape: tuple[int, int], device: str, windows: Iterable[int | None] | None
    ) -> None:
        """`shape`: rows and tokens; `windows`: of flex attention's masks, None: attention makes its own."""
        rows, tokens = shape
        self.device, self.num_places = device, rows * tokens
        self.bound = min(self.num_places, -(-int(LEARNT_SHARE * self.num_places) // 128) * 128)

        def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        n = self.bound
        self.tensors = Tensors(
            all_tokens=zeros(rows, tokens + 1),
            positions=zeros(rows, tokens),
            docs=zeros(rows, tokens, dtype=torch.int32),
            places=zeros(n),
            next_one=zeros(n),
            weights=zeros(n, dtype=torch.float32),
            places_of_two=zeros(n),
            next_two=zeros(n),
            weights_of_two=zeros(n, dtype=torch.float32),
        )
        self._lists: dict[int | None, tuple[Tensor, ...]] = {}
        if windows is not None:
            docs = self.tensors.docs
            self._lists = {w: block_lists(docs, w) for w in set(windows)}
            self.tensors.block_masks = {
                w: block_mask_of(docs, w, lists) for w, lists in self._lists.items()
            }

    def fill(self, drawn: Batch) -> bool:
        """Take a batch; False, and nothing is changed, where it learns more places than there is room for."""
        arrays = arrays_of(drawn)
        if len(arrays["places"]) > self.bound:
            return False
        for field in fields(Tensors):
            if field.name != "block_masks":
                room = getattr(self.tensors, field.name)
                self._copy(torch.from_numpy(self._padded(field.name, arrays[field.name])), room)
        docs = torch.from_numpy(arrays["docs"])
        for window, lists in self._lists.items():
            for found, room in zip(block_lists(docs, window), lists, strict=True):
                self._copy(found, room)
        return True

    def _copy(self, found: Tensor, room: Tensor) -> None:
        assert found.shape == room.shape, f"a batch of {list(found.shape)} for {list(room.shape)}"
        room.copy_(_staged(found, self.device), non_blocking=True)

    def _padded(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return an array of `bound` numbers, those added of weight zero; rows as they are."""
        if array.ndim > 1:
            return array
        if name.startswith("places"):
            # Places one after another: their gradients are zeros, and to add them to one row would make a queue.
            whole = np.arange(self.bound, dtype="int64")
        else:
            whole = np.zeros(self.bound, dtype=array.dtype)
        whole[: len(array)] = array
        return whole
