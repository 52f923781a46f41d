"""Where every tensor of a gpt-oss checkpoint goes: Hugging Face and OpenAI layouts, MXFP4, bf16 and FP8.

One table of places (what the model has) and one table of names per layout; joined they are the rules that loader,
converter, inspector and synthesiser run on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rose.config.quant import QuantConfig
from rose.kernels.formats import BF16, FP8_BLOCK, MXFP4, FormattedTensor
from rose.kernels.weights import ExpertWeights, LinearWeights
from rose.models.gpt_oss.config import GptOssConfig
from rose.models.gpt_oss.parameters import GptOssParameters, LayerParameters
from rose.quant.scheme import scheme
from rose.utils.errors import CheckpointError, ConfigError
from rose.weights.loader import Progress, blank_targets, ignore_progress, load_targets
from rose.weights.pieces import Cut
from rose.weights.reader import CheckpointReader, config_path, read_json
from rose.weights.rules import PLAIN, Storage, WeightRule, expand


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One part of one target. Letters: see `_sizes`."""

    role: str
    letters: str
    part: int = 0
    num_parts: int = 1
    split_axis: int | None = None
    is_first_rank_only: bool = False


# Letters  V vocabulary, D hidden, Q all query heads, G all key (or value) heads, H query heads counted,
#          E experts, F gate and up interleaved, I intermediate
PLACES: dict[str, Place] = {
    "embedding": Place(role="embedding", letters="VD"),
    "final_norm": Place(role="norm", letters="D"),
    "head": Place(role="head", letters="VD"),
    "layers.{n}.attention_norm": Place(role="norm", letters="D"),
    "layers.{n}.qkv.matrix/0": Place(
        role="projection", letters="QD", part=0, num_parts=3, split_axis=0
    ),
    "layers.{n}.qkv.matrix/1": Place(
        role="projection", letters="GD", part=1, num_parts=3, split_axis=0
    ),
    "layers.{n}.qkv.matrix/2": Place(
        role="projection", letters="GD", part=2, num_parts=3, split_axis=0
    ),
    "layers.{n}.qkv.bias/0": Place(role="bias", letters="Q", part=0, num_parts=3, split_axis=0),
    "layers.{n}.qkv.bias/1": Place(role="bias", letters="G", part=1, num_parts=3, split_axis=0),
    "layers.{n}.qkv.bias/2": Place(role="bias", letters="G", part=2, num_parts=3, split_axis=0),
    "layers.{n}.sinks": Place(role="sinks", letters="H", split_axis=0),
    "layers.{n}.out.matrix": Place(role="projection", letters="DQ", split_axis=1),
    "layers.{n}.out.bias": Place(role="bias", letters="D", is_first_rank_only=True),
    "layers.{n}.expert_norm": Place(role="norm", letters="D"),
    "layers.{n}.router.matrix": Place(role="router", letters="ED"),
    "layers.{n}.router.bias": Place(role="bias", letters="E"),
    "layers.{n}.experts.gate_up_bias": Place(role="bias", letters="EF", split_axis=0),
    "layers.{n}.experts.gate_up": Place(role="experts", letters="EFD", split_axis=0),
    "layers.{n}.experts.down_bias": Place(role="bias", letters="ED", split_axis=0),
    "layers.{n}.experts.down": Place(role="experts", letters="EDI", split_axis=0),
}

_HF = "model.layers.{n}."
HUGGING_FACE: dict[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers.{n}.attention_norm": _HF + "input_layernorm.weight",
    "layers.{n}.qkv.matrix/0": _HF + "self_attn.q_proj.weight",
    "layers.{n}.qkv.matrix/1": _HF + "self_attn.k_proj.weight",
    "layers.{n}.qkv.matrix/2": _HF + "self_attn.v_proj.weight",
    "layers.{n}.qkv.bias/0": _HF + "self_attn.q_proj.bias",
    "layers.{n}.qkv.bias/1": _HF + "self_attn.k_proj.bias",
    "layers.{n}.qkv.bias/2": _HF + "self_attn.v_proj.bias",
    "layers.{n}.sinks": _HF + "self_attn.sinks",
    "layers.{n}.out.matrix": _HF + "self_attn.o_proj.weight",
    "layers.{n}.out.bias": _HF + "self_attn.o_proj.bias",
    "layers.{n}.expert_norm": _HF + "post_attention_layernorm.weight",
    "layers.{n}.router.matrix": _HF + "mlp.router.weight",
    "layers.{n}.router.bias": _HF + "mlp.router.bias",
    "layers.{n}.experts.gate_up": _HF + "mlp.experts.gate_up_proj",
    "layers.{n}.experts.gate_up_bias": _HF + "mlp.experts.gate_up_proj_bias",
    "layers.{n}.experts.down": _HF + "mlp.experts.down_proj",
    "layers.{n}.experts.down_bias": _HF + "mlp.experts.down_proj_bias",
}

# q, k and v are rows of one tensor here: the parts share a name.
_OPENAI = "block.{n}."
ORIGINAL: dict[str, str] = {
    "embedding": "embedding.weight",
    "final_norm": "norm.scale",
    "head": "unembedding.weight",
    "layers.{n}.attention_norm": _OPENAI + "attn.norm.scale",
    **{f"layers.{{n}}.qkv.matrix/{part}": _OPENAI + "attn.qkv.weight" for part in range(3)},
    **{f"layers.{{n}}.qkv.bias/{part}": _OPENAI + "attn.qkv.bias" for part in range(3)},
    "layers.{n}.sinks": _OPENAI + "attn.sinks",
    "layers.{n}.out.matrix": _OPENAI + "attn.out.weight",
    "layers.{n}.out.bias": _OPENAI + "attn.out.bias",
    "layers.{n}.expert_norm": _OPENAI + "mlp.norm.scale",
    "layers.{n}.router.matrix": _OPENAI + "mlp.gate.weight",
    "layers.{n}.router.bias": _OPENAI + "mlp.gate.bias",
    "layers.{n}.experts.gate_up": _OPENAI + "mlp.mlp1_weight",
    "layers.{n}.experts.gate_up_bias": _OPENAI + "mlp.mlp1_bias",
    "layers.{n}.experts.down": _OPENAI + "mlp.mlp2_weight",
    "layers.{n}.experts.down_bias": _OPENAI + "mlp.mlp2_bias",
}

# Storage of the experts by layout and format. HAZARD: the plain Hugging Face experts are [in, out]; with
# hidden size = intermediate size a forgotten transpose of `down` has the right shape and wrong numbers.
EXPERT_STORAGE: dict[tuple[str, str], Storage] = {
    ("hugging_face", "mxfp4"): Storage(
        format=MXFP4, values_suffix="_blocks", scales_suffix="_scales"
    ),
    ("hugging_face", "bf16"): Storage(format=BF16, is_transposed=True),
    ("hugging_face", "fp8_block"): Storage(
        format=FP8_BLOCK, values_suffix="_fp8", scales_suffix="_scale_inv"
    ),
    ("original", "mxfp4"): Storage(format=MXFP4, values_suffix=".blocks", scales_suffix=".scales"),
    ("original", "bf16"): PLAIN,
}
FP8_PROJECTION = Storage(format=FP8_BLOCK, scales_suffix="_scale_inv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What kind of checkpoint it is."""

    naming: str
    """hugging_face or original."""
    experts: str
    """mxfp4, bf16 (any plain element type) or fp8_block."""
    has_fp8_projections: bool = False
    plain_dtype: str = "BF16"
    """Element type of plain experts, as safetensors names it."""

    @property
    def format(self) -> str:
        """Name of the format for QuantConfig.weights."""
        if self.experts == "fp8_block":
            return "fp8_block_all" if self.has_fp8_projections else "fp8_block"
        is_wide = self.experts == "bf16" and self.plain_dtype in ("F32", "F64")
        return "float32" if is_wide else self.experts


def detect(reader: CheckpointReader) -> Layout:
    """Tell the layout from names and element types.

    Raises  CheckpointError where the names are of no known layout, or of two.
    """
    names = reader.entries
    namings = [
        naming
        for naming, starts in (
            ("hugging_face", ("model.", "lm_head.")),
            ("original", ("block.", "embedding.", "unembedding.", "norm.")),
        )
        if any(name.startswith(starts) for name in names)
    ]
    if len(namings) != 1:
        some = ", ".join(sorted(names)[:4]) or "no tensors"
        found = "names of both" if namings else "names of neither"
        raise CheckpointError(
            f"{reader.folder} was to be read as gpt-oss, but holds {found} of the known layouts (found: {some}); "
            "known: Hugging Face (model.layers.N....) and OpenAI original (block.N....); choose another folder"
        )
    table = HUGGING_FACE if namings[0] == "hugging_face" else ORIGINAL
    ending = table["layers.{n}.experts.gate_up"].split("{n}")[1]
    counts = {
        form: sum(1 for name in names if name.endswith(ending + storage.values_suffix))
        for (naming, form), storage in EXPERT_STORAGE.items()
        if naming == namings[0]
    }
    experts = max(counts, key=lambda form: counts[form])
    plain = next((e.dtype for n, e in names.items() if n.endswith(ending)), "BF16")
    return Layout(
        naming=namings[0],
        experts=experts,
        has_fp8_projections=any(n.endswith("_proj.weight_scale_inv") for n in names),
        plain_dtype=plain,
    )


def _sizes(config: GptOssConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "Q": config.num_q_heads * config.head_dim,
        "G": config.num_kv_heads * config.head_dim,
        "H": config.num_q_heads,
        "E": config.num_experts,
        "F": 2 * config.intermediate_size,
        "I": config.intermediate_size,
    }


def rules(config: GptOssConfig, layout: Layout) -> list[WeightRule]:
    """Return the rules that read a checkpoint of this layout, every layer written out."""
    sizes = _sizes(config)
    is_original = layout.naming == "original"
    names = ORIGINAL if is_original else HUGGING_FACE
    table = []
    for key, place in PLACES.items():
        shape = tuple(sizes[letter] for letter in place.letters)
        is_fused = is_original and place.num_parts == 3
        storage = PLAIN
        if place.role == "experts":
            storage = EXPERT_STORAGE[layout.naming, layout.experts]
        elif place.role in ("projection", "head") and layout.has_fp8_projections:
            storage = FP8_PROJECTION
        table.append(
            WeightRule(
                source=names[key],
                target=key.split("/")[0],
                role=place.role,
                shape=shape,
                storage=storage,
                part=place.part,
                num_parts=place.num_parts,
                first_row=(0, sizes["Q"], sizes["Q"] + sizes["G"])[place.part] if is_fused else 0,
                source_rows=sizes["Q"] + 2 * sizes["G"] if is_fused else None,
                split_axis=place.split_axis,
                is_first_rank_only=place.is_first_rank_only,
            )
        )
    return expand(table, config.num_layers)


def read_config(folder: Path) -> GptOssConfig:
    """Read config.json of either layout.

    Raises  CheckpointError where it is missing, damaged, of another architecture or contradictory.
    """
    path = config_path(folder)
    try:
        return GptOssConfig.from_json(read_json(path))
    except CheckpointError as error:
        lines = [line if str(path) in line else f"{path}: {line}" for line in error.problems]
        raise CheckpointError(lines) from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{path} holds a value of the wrong kind ({error}); sizes are whole numbers, rope_scaling is an object; "
            "restore the file from the checkpoint's source"
        ) from None


def checkpoint_format(folder: Path) -> str:
    """Return the format the checkpoint is stored in, as QuantConfig.weights names it."""
    with CheckpointReader(folder) as reader:
        return detect(reader).format


def check_split(config: GptOssConfig, size: int) -> None:
    """Refuse a number of ranks that cannot share the heads and the experts evenly.

    Raises  ConfigError listing what cannot be cut.
    """
    counts = {
        "query heads": config.num_q_heads,
        "kv heads": config.num_kv_heads,
        "experts": config.num_experts,
    }
    allowed = [n for n in range(1, 65) if all(count % n == 0 for count in counts.values())]
    problems = [
        f"{size} ranks cannot share {count} {name}; allowed: {', '.join(map(str, allowed))}; "
        "change parallel.tp"
        for name, count in counts.items()
        if size < 1 or count % size
    ]
    if problems:
        raise ConfigError(problems)


def load(
    folder: Path,
    config: GptOssConfig,
    quant: QuantConfig,
    *,
    rank: int = 0,
    size: int = 1,
    device: str = "cpu",
    progress: Progress = ignore_progress,
) -> GptOssParameters:
    """Load one rank's share of a checkpoint of any layout into the formats of a resolved `quant`.

    Attention is cut by heads, experts are kept whole and shared out; embedding, router and head are on every rank.
    Raises  CheckpointError listing all that is missing, unused, misshapen or damaged; ConfigError
    """
    check_split(config, size)
    formats = scheme(quant)
    with CheckpointReader(folder) as reader:
        targets = load_targets(
            reader,
            rules(config, detect(reader)),
            format_of=formats.of_role,
            cut=Cut(rank=rank, size=size),
            device=device,
            progress=progress,
        )
    return assemble(targets, config.num_layers)


def blank(
    config: GptOssConfig, quant: QuantConfig, *, rank: int = 0, size: int = 1
) -> GptOssParameters:
    """Return what `load` would, whatever the checkpoint's layout, without numbers: on torch's meta device."""
    any_layout = Layout(naming="hugging_face", experts="bf16")
    targets = blank_targets(
        rules(config, any_layout), format_of=scheme(quant).of_role, cut=Cut(rank=rank, size=size)
    )
    return assemble(targets, config.num_layers)


def assemble(targets: dict[str, FormattedTensor], num_layers: int) -> GptOssParameters:
    """Build the tree of parameters out of loaded targets."""
    return GptOssParameters(
        embedding_VD=targets["embedding"].values,
        layers=tuple(_layer(targets, f"layers.{n}.") for n in range(num_layers)),
        final_norm_D=targets["final_norm"].values,
        head=LinearWeights(matrix=targets["head"]),
    )


def _layer(targets: dict[str, FormattedTensor], at: str) -> LayerParameters:
    def linear(name: str) -> LinearWeights:
        bias = targets.get(f"{at}{name}.bias")
        return LinearWeights(
            matrix=targets[f"{at}{name}.matrix"], bias_N=None if bias is None else bias.values
        )

    return LayerParameters(
        attention_norm_D=targets[f"{at}attention_norm"].values,
        qkv=linear("qkv"),
        sinks_H=targets[f"{at}sinks"].values,
        out=linear("out"),
        expert_norm_D=targets[f"{at}expert_norm"].values,
        router=linear("router"),
        experts=ExpertWeights(
            gate_up=targets[f"{at}experts.gate_up"],
            gate_up_bias_EF=targets[f"{at}experts.gate_up_bias"].values,
            down=targets[f"{at}experts.down"],
            down_bias_ED=targets[f"{at}experts.down_bias"].values,
        ),
    )
