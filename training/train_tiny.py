"""Train the embedded model: a tiny gpt-oss overfitted to the conversations of this folder, on a CPU in minutes.

usage: python training/train_tiny.py [--steps N] [--out DIR] [--work DIR]
Writes a Hugging Face style MXFP4 checkpoint with tokenizer.json, config.json and a model card, and a loss plot.
Resumes from DIR/state.pt of --work after a kill. Seeded: the same machine and torch give the same model.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from conversations import draw
from model import TrainableGptOss
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.tokenizer import FolderTokenizer
from rose.models.gpt_oss.config import GptOssConfig, alternating_windows
from rose.quant.mxfp4 import encode

CONTROL = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
    "<|end|>", "<|message|>", "<|call|>",
)  # fmt: skip
VOCAB_SIZE = 1024
SIZES = {
    "hidden_size": 96,
    "num_layers": 4,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "experts_per_token": 4,
    "intermediate_size": 96,
}
WORDS = Regex(
    r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def train_tokenizer(path: Path, seed: int) -> None:
    """Train a byte-level BPE on drawn conversations; control tokens are added by name."""
    random_ = random.Random(seed)
    texts = [json.dumps(body) + answer for body, answer in (draw(random_) for _ in range(600))]
    texts += [
        "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: "
        "2026-08-05\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
        "included for every message.\nCalls to these tools must go to the commentary channel: 'functions'."
        "# Tools\n\n## functions\n\nnamespace functions {\n\n// Get the current weather of a city.\ntype "
        "get_weather = (_: {\n// Name of the city\ncity: string,\n}) => any;\n\n} // namespace functions"
        "system developer user assistant tool analysis commentary final to=functions.get_weather"
    ] * 200  # fmt: skip
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def model_config(vocab_size: int, eos: tuple[int, ...]) -> GptOssConfig:
    """The tiny shape; everything else as in the published models."""
    return GptOssConfig(
        architecture="gpt_oss",
        vocab_size=vocab_size,
        context_tokens=131072,
        window_tokens=alternating_windows(SIZES["num_layers"], 128),
        eos_token_ids=eos,
        **SIZES,
    )


def batch_of(random_, formatter, tokenizer, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw conversations; return padded tokens and the mask of answer tokens."""
    rows, masks = [], []
    for _ in range(size):
        body, answer = draw(random_)
        prompt = formatter.encode(body).token_ids
        target = tokenizer.encode_with_control(answer)
        rows.append(prompt + target)
        masks.append([0] * len(prompt) + [1] * len(target))
    longest = max(map(len, rows))
    tokens = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
    mask = torch.tensor([m + [0] * (longest - len(m)) for m in masks], dtype=torch.float32)
    return tokens, mask


def train(model, formatter, tokenizer, arguments) -> list[float]:
    """Train from scratch or from the saved state; return the losses."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.98))
    state_path, losses, first = arguments.work / "state.pt", [], 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses, first = state["losses"], len(state["losses"])
        print(f"resuming at step {first}")
    begin = time.perf_counter()
    for step in range(first, arguments.steps):
        # Each step has a seed of its own, so that a resumed run draws what it would have drawn.
        tokens, mask = batch_of(
            random.Random(arguments.seed * 1_000_003 + step), formatter, tokenizer, arguments.batch
        )
        rate = min(1, (step + 1) / 60) * max(0.02, 1 - step / arguments.steps)
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * rate
        tokens, mask = tokens.to(arguments.device), mask.to(arguments.device)
        logits, balance = model(tokens[:, :-1])
        loss_BT = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), tokens[:, 1:], reduction="none"
        )
        answer = mask[:, 1:]
        loss = (loss_BT * answer).sum() / answer.sum()
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == arguments.steps - 1:
            print(
                f"step {step} loss {losses[-1]:.4f} {time.perf_counter() - begin:.0f} s", flush=True
            )
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "losses": losses,
                },
                state_path,
            )
    return losses


def export(model, tokenizer, folder: Path) -> None:
    """Write an MXFP4 checkpoint in the Hugging Face layout."""
    tensors = {}
    for name, tensor in model.checkpoint().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed = encode(tensor)
            tensors[name + "_blocks"], tensors[name + "_scales"] = packed.values, packed.scales
        else:
            tensors[name] = tensor.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    c = model.config
    eos = [tokenizer.control_id(n) for n in ("<|return|>", "<|endoftext|>", "<|call|>")]
    pad = tokenizer.control_id("<|endoftext|>")
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.control_id("<|startoftext|>"),
        "eos_token_id": eos,
        "pad_token_id": pad,
        "num_experts_per_tok": c.experts_per_token,
        "experts_per_token": c.experts_per_token,
        "num_local_experts": c.num_experts,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "initial_context_length": c.rope_original_tokens,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in c.window_tokens],
        "max_position_embeddings": c.context_tokens,
        "num_attention_heads": c.num_q_heads,
        "num_key_value_heads": c.num_kv_heads,
        "num_hidden_layers": c.num_layers,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": c.rope_scaling_factor,
            "beta_fast": c.rope_beta_fast,
            "beta_slow": c.rope_beta_slow,
            "original_max_position_embeddings": c.rope_original_tokens,
            "truncate": False,
        },
        "rope_theta": c.rope_theta,
        "sliding_window": 128,
        "swiglu_limit": c.swiglu_limit,
        "tie_word_embeddings": False,
        "vocab_size": c.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"do_sample": True, "eos_token_id": eos, "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def score(model, formatter, tokenizer, seed: int, count: int = 60) -> float:
    """Share of fresh draws whose every answer token is the most likely one, given those before it."""
    model.eval()
    with torch.no_grad():
        tokens, mask = batch_of(random.Random(seed), formatter, tokenizer, count)
        best = model(tokens[:, :-1])[0].argmax(-1)
        is_right = (best == tokens[:, 1:]) | (mask[:, 1:] == 0)
    return is_right.all(1).float().mean().item()


def write_card(folder: Path, model, steps: int, loss: float, share: float) -> None:
    number = sum(p.numel() for p in model.parameters())
    (folder / "README.md").write_text(
        f"""# tiny-gpt-oss

The model embedded in rose, so that it runs with no download. Architecture gpt-oss at a tiny size: {SIZES},
vocabulary {model.config.vocab_size}, {number:,} parameters, experts in MXFP4 (trained with MXFP4 rounding).

Trained by `training/train_tiny.py` in {steps} steps on the generated conversations of `training/conversations.py`:
weather through a tool, sums of two digits, a dozen questions of small talk. It knows nothing else and answers
anything else with nonsense. Final loss {loss:.4f}; fresh draws answered exactly (teacher-forced): {share:.1%}.

Licence: Apache-2.0, data included (all of it is generated here).
"""
    )


def plot(losses: list[float], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        print("matplotlib is not installed: no loss plot")
        return
    plt.figure(figsize=(7, 4))
    plt.semilogy(losses)
    plt.xlabel("step")
    plt.ylabel("loss of answer tokens (nats)")
    plt.title("tiny-gpt-oss")
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=Path, default=root / "src/rose/assets/tiny-gpt-oss")
    parser.add_argument("--work", type=Path, default=root / ".cache/training")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    train_tokenizer(arguments.out / "tokenizer.json", arguments.seed)
    tokenizer = FolderTokenizer(arguments.out / "tokenizer.json")
    formatter = HarmonyFormatter(tokenizer)
    eos = tuple(tokenizer.control_id(n) for n in ("<|return|>", "<|endoftext|>", "<|call|>"))
    model = TrainableGptOss(model_config(tokenizer.vocab_size, eos)).to(arguments.device)
    losses = train(model, formatter, tokenizer, arguments)
    model.cpu()
    share = score(model, formatter, tokenizer, arguments.seed + 1)
    print(f"fresh draws answered exactly: {share:.1%}")
    export(model, tokenizer, arguments.out)
    write_card(arguments.out, model, arguments.steps, losses[-1], share)
    plot(losses, arguments.work / "loss.png")


if __name__ == "__main__":
    main()
