"""Teacher-forced log-probabilities of fixed texts: of the served model, of the float64 reference, and stored ones.

The stored file lies in the model's folder; `rose eval --store` writes it with the reference, in float64, from the
weights of the checkpoint. It names each text by a hash of its tokens: another vocabulary or text is noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rose.eval.rendering import Documents
from rose.eval.tasks import held_out_set
from rose.frontend.tokenizer import Tokenizer
from rose.layers.own_pages import OwnPages
from rose.models.gpt_oss import reference
from rose.models.gpt_oss.model import GptOss
from rose.utils.errors import CheckpointError

FILE_NAME = "logprobs.json"
ENGLISH = Path(__file__).with_name("texts") / "english.txt"
SEED = 4
"""Of the conversations among the texts."""
_ANEW = "write it anew with rose eval --store"
_MOST_DIGITS = 6
"""After the point: served models differ from float64 by 1e-4 at the least."""


class StoredText(msgspec.Struct, kw_only=True):
    """What the file holds of one text."""

    tokens: str
    """Hash of its tokens."""
    log_probabilities: list[float]
    """Of the float64 reference, for each token but the first."""


class _Stored(msgspec.Struct, kw_only=True):
    texts: dict[str, StoredText]


def fixed_texts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Return the texts as token ids: English, short conversations, and one of more than 3,000 tokens."""
    documents = Documents(tokenizer)
    short = [
        token_id
        for task in ("arithmetic", "reverse", "tool_call", "instruction", "json")
        for token_id in documents.whole(held_out_set(task, 1, seed=SEED)[0])[0]
    ]
    [recall] = held_out_set("long_copy", 1, seed=SEED)
    return {
        "english": tokenizer.encode(ENGLISH.read_text()),
        "conversations": short,
        "long": documents.whole(recall)[0],
    }


@torch.inference_mode()
def served_logits(model: GptOss, token_ids: list[int]) -> Tensor:
    """Return float32 logits [T, V] of one prefill by the kernels that serve."""
    pages = OwnPages(
        model.config,
        num_sequences=1,
        max_tokens=len(token_ids),
        page_tokens=model.page_tokens,
        dtype=model.kv_dtype,
        device=model.device,
    )
    tokens_T = torch.tensor(token_ids, device=model.device)
    hidden_TD = model.forward(tokens_T, pages.step(prefill=[(0, len(token_ids))]))
    return torch.cat([model.logits(part_TD) for part_TD in hidden_TD.split(256)])


def of_next(logits_TV: Tensor, token_ids: list[int]) -> Tensor:
    """Return float64 log-probabilities [T - 1] of each token given those before it."""
    following_T = torch.tensor(token_ids[1:], device=logits_TV.device)
    parts = zip(logits_TV[:-1].split(256), following_T.split(256), strict=True)
    return torch.cat(
        [p.double().log_softmax(-1).gather(1, n[:, None])[:, 0].cpu() for p, n in parts]
    )


def mean_kl(right_TV: Tensor, found_TV: Tensor) -> float:
    """Return the mean over positions of KL(right || found), in nats."""
    right, found = (x.double().log_softmax(-1) for x in (right_TV, found_TV))
    return float((right.exp() * (right - found)).sum(-1).mean())


def store(
    folder: Path,
    config: reference.ReferenceConfig,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
) -> Path:
    """Write the reference's log-probabilities of all texts; `weights` float64 in the reference's names."""
    texts = {}
    for name, token_ids in fixed_texts(tokenizer).items():
        logits_TV = reference.forward(config, weights, torch.tensor(token_ids))
        values = of_next(logits_TV, token_ids).tolist()
        texts[name] = {
            "tokens": _digest(token_ids),
            "log_probabilities": [round(v, _MOST_DIGITS) for v in values],
        }
    path = folder / FILE_NAME
    path.write_text(json.dumps({"dtype": "float64", "texts": texts}) + "\n")
    return path


def compare(folder: Path, model: GptOss, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return perplexities of the served model, and, where the folder has stored values, the distance to them.

    Raises   CheckpointError where stored values belong to other texts or another vocabulary
    """
    path = folder / FILE_NAME
    stored = _stored(path) if path.exists() else {}
    found: dict[str, Any] = {}
    for name, token_ids in fixed_texts(tokenizer).items():
        values_T = of_next(served_logits(model, token_ids), token_ids)
        line = {"num_tokens": len(token_ids), "perplexity": math.exp(-float(values_T.mean()))}
        if name in stored:
            is_whole = len(stored[name].log_probabilities) == len(token_ids) - 1
            if stored[name].tokens != _digest(token_ids) or not is_whole:
                raise CheckpointError(
                    f"{path}: text {name!r} was stored for other tokens; needed: those of this tokenizer.json and this "
                    f"version of rose; {_ANEW}"
                )
            difference_T = (values_T - torch.tensor(stored[name].log_probabilities)).abs()
            line |= {"mean_difference": float(difference_T.mean())}
            line |= {"largest_difference": float(difference_T.max())}
        found[name] = line
    return found


def _stored(path: Path) -> dict[str, StoredText]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Stored).texts
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); needed: what rose wrote; {_ANEW}"
        ) from None


def _digest(token_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]
