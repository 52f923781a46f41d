"""A trained model as a checkpoint folder in the Hugging Face layout: MXFP4 experts, everything else bf16.

usage: PYTHONPATH=src python training/export.py DIR/parent.pt FOLDER
Writes the unrounded parent with bf16 experts, so that `rose eval FOLDER --weights bf16 --weights mxfp4` compares them.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sizes import model_config
from torch import Tensor
from trainable import Block, MtpHead, TrainableGptOss

from rose.frontend.tokenizer import FolderTokenizer
from rose.models.gpt_oss.hugging_face import config_json, with_quantization
from rose.quant.mxfp4 import encode
from rose.utils.errors import RoseError


class SavedFileError(RoseError):
    """A file of an earlier run cannot be taken back: it is damaged, or of another run."""


def load_saved(path: Path, take: Callable[[dict[str, Any]], None], device: str = "cpu") -> None:
    """Read what torch.save wrote, and `take` it back.

    Raises  SavedFileError with what was found, where the file cannot be read or what it holds does not fit
    """
    try:
        saved = torch.load(path, weights_only=True, map_location=device)
    except OSError as error:
        raise SavedFileError(f"{path} cannot be read ({error.strerror or error})") from error
    except torch.OutOfMemoryError:
        raise
    # Each damage has an error of its own: EOFError, KeyError, UnpicklingError ... Their words give advice on
    # torch.load, and to load more than weights, which is no cure.
    except Exception as error:
        size = path.stat().st_size
        raise SavedFileError(
            f"{path} ({size} bytes) is damaged, or was not written by torch.save ({type(error).__name__})"
        ) from error
    try:
        take(saved)
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}".splitlines()
        raise SavedFileError(f"{path} holds something else ({' '.join(told[:2])})") from error


MTP = "model.mtp.0."
"""Of the one head that predicts the token after the next; the model alone reads none of these."""


def _block(block: Block, at: str) -> dict[str, Tensor]:
    c = block.config
    q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    matrices, biases = block.qkv_proj.split([q, kv, kv]), block.qkv_bias.split([q, kv, kv])
    named: dict[str, Tensor] = {
        at + "input_layernorm.weight": block.input_layernorm,
        at + "post_attention_layernorm.weight": block.post_attention_layernorm,
        at + "self_attn.o_proj.weight": block.o_proj,
        at + "self_attn.o_proj.bias": block.o_bias,
        at + "self_attn.sinks": block.sinks,
        at + "mlp.router.weight": block.router,
        at + "mlp.router.bias": block.router_bias,
        at + "mlp.experts.gate_up_proj": block.gate_up_proj,
        at + "mlp.experts.gate_up_proj_bias": block.gate_up_bias,
        at + "mlp.experts.down_proj": block.down_proj,
        at + "mlp.experts.down_proj_bias": block.down_bias,
    }
    for name, matrix, bias in zip("qkv", matrices, biases, strict=True):
        named[f"{at}self_attn.{name}_proj.weight"] = matrix
        named[f"{at}self_attn.{name}_proj.bias"] = bias
    return named


def tensors(model: TrainableGptOss, mtp: MtpHead | None = None) -> dict[str, Tensor]:
    """Return the weights in the names of the Hugging Face layout; experts as plain [E, out, in]."""
    named: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed_tokens,
        "model.norm.weight": model.norm,
        "lm_head.weight": model.lm_head,
    }
    for n, block in enumerate(model.layers):
        assert isinstance(block, Block)
        named |= _block(block, f"model.layers.{n}.")
    if mtp is not None:
        named |= {
            MTP + "hidden_norm.weight": mtp.hidden_norm,
            MTP + "embed_norm.weight": mtp.embed_norm,
            MTP + "norm.weight": mtp.norm,
            MTP + "proj.weight": mtp.proj,
        }
        named |= _block(mtp.block, MTP + "layer.")
    return {name: tensor.detach().cpu() for name, tensor in named.items()}


def stored(named: dict[str, Tensor], *, is_packed: bool = True) -> dict[str, Tensor]:
    """Return what lies in the file: experts packed (or plain, which lie there as [E, in, out]), the rest in bf16."""
    packed = {}
    for name, tensor in named.items():
        is_expert = name.endswith(("gate_up_proj", "down_proj"))
        if is_expert and is_packed:
            matrix = encode(tensor)
            packed[name + "_blocks"], packed[name + "_scales"] = matrix.values, matrix.scales
        elif is_expert:
            packed[name] = tensor.mT.to(torch.bfloat16).contiguous()
        else:
            packed[name] = tensor.to(torch.bfloat16).contiguous()
    return packed


def export(
    model: TrainableGptOss,
    tokenizer: FolderTokenizer,
    folder: Path,
    mtp: MtpHead | None = None,
    *,
    is_packed: bool = True,
) -> None:
    """Write weights (experts in MXFP4, or in bf16), tokenizer.json, config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = stored(tensors(model, mtp), is_packed=is_packed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(tokenizer.name, folder / "tokenizer.json")
    ids = {n: tokenizer.control_id(f"<|{n}|>") for n in ("return", "endoftext", "call")}
    begin, eos = tokenizer.control_id("<|startoftext|>"), list(ids.values())
    config = with_quantization(config_json(model.config), "mxfp4" if is_packed else "bf16")
    config |= {"eos_token_id": eos, "pad_token_id": ids["endoftext"], "bos_token_id": begin}
    if mtp is not None:
        config["num_nextn_predict_layers"] = 1
    _write(folder / "config.json", config)
    generation = {"do_sample": True, "eos_token_id": eos, "pad_token_id": ids["endoftext"]}
    _write(folder / "generation_config.json", generation)


def _write(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def save_parent(model: TrainableGptOss, mtp: MtpHead, path: Path) -> None:
    """Write the unrounded weights in bf16, those of the head under `mtp.`."""
    named = dict(model.named_parameters()) | {f"mtp.{n}": p for n, p in mtp.named_parameters()}
    torch.save({name: p.detach().bfloat16().cpu() for name, p in named.items()}, path)


def load_parent(model: TrainableGptOss, mtp: MtpHead, path: Path) -> None:
    """Take back what `save_parent` wrote.

    Raises  SavedFileError
    """

    def take(saved: dict[str, Any]) -> None:
        weights = {n: w.float() for n, w in saved.items()}
        of_head = {n.removeprefix("mtp."): w for n, w in weights.items() if n.startswith("mtp.")}
        mtp.load_state_dict(of_head)
        model.load_state_dict({n: w for n, w in weights.items() if not n.startswith("mtp.")})

    load_saved(path, take)


def export_parent(path: Path, folder: Path, size: str = "large") -> None:
    """Write a checkpoint folder with bf16 experts from a file of `save_parent`, without the head."""
    tokenizer = FolderTokenizer(Path(__file__).with_name("tokenizer.json"))
    config = model_config(size, tokenizer.vocab_size, end_tokens(tokenizer))
    model = TrainableGptOss(config)
    load_parent(model, MtpHead(config), path)
    export(model, tokenizer, folder, is_packed=False)


def end_tokens(tokenizer: FolderTokenizer) -> tuple[int, ...]:
    """Return the tokens that end an answer."""
    return tuple(tokenizer.control_id(f"<|{n}|>") for n in ("return", "endoftext", "call"))


if __name__ == "__main__":
    try:
        export_parent(Path(sys.argv[1]), Path(sys.argv[2]))
    except SavedFileError as found:
        sys.exit(f"error: {found}")
