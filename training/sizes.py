"""The sizes that are trained: the embedded model, its draft, and one for a dry run on a CPU.

Head size 64 as in the published models; hidden and intermediate sizes are odd multiples of 64, so no tile of 128
divides them. Bytes of all checkpoints together stay under 24 MB (`checkpoint_bytes`, a test holds them to it).
"""

from dataclasses import replace

from rose.models.gpt_oss.config import GptOssConfig, alternating_windows, tiny

SIZES: dict[str, dict[str, int]] = {
    "draft": {
        "hidden_size": 192,
        "num_layers": 2,
        "num_q_heads": 4,
        "num_kv_heads": 1,
        "num_experts": 8,
        "intermediate_size": 192,
    },
    "trial": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_q_heads": 2,
        "num_kv_heads": 1,
        "num_experts": 8,
        "intermediate_size": 32,
    },
}
WINDOW_TOKENS = 128


def model_config(size: str, vocab_size: int, eos: tuple[int, ...]) -> GptOssConfig:
    """Return the configuration of a size: large (what rose calls tiny) or one of SIZES."""
    sizes = SIZES.get(size, {})
    windows = alternating_windows(sizes.get("num_layers", tiny().num_layers), WINDOW_TOKENS)
    return replace(tiny(), vocab_size=vocab_size, eos_token_ids=eos, window_tokens=windows, **sizes)


def block_parameters(c: GptOssConfig, num_experts: int) -> tuple[int, int]:
    """Return parameters of one layer outside and inside `num_experts` experts' matrices."""
    q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = (q + 2 * kv) * (c.hidden_size + 1) + (q + 1) * c.hidden_size + c.num_q_heads
    router = (c.hidden_size + 1) * c.num_experts
    biases = num_experts * (2 * c.intermediate_size + c.hidden_size)
    plain = attention + router + biases + 2 * c.hidden_size
    return plain, num_experts * 3 * c.hidden_size * c.intermediate_size


def active_parameters(c: GptOssConfig) -> int:
    """Return the parameters that take part in one token, output head included, embedding not."""
    block = sum(block_parameters(c, c.experts_per_token))
    return c.num_layers * block + (c.vocab_size + 1) * c.hidden_size


def checkpoint_bytes(c: GptOssConfig, *, num_mtp: int) -> int:
    """Return bytes of the tensors: experts in MXFP4 (17 bytes per 32 numbers), the rest in bf16."""
    plain, experts = block_parameters(c, c.num_experts)
    blocks = (c.num_layers + num_mtp) * (2 * plain + experts * 17 // 32)
    mtp = num_mtp * 2 * (2 * c.hidden_size**2 + 3 * c.hidden_size)
    return blocks + mtp + 2 * (2 * c.vocab_size + 1) * c.hidden_size


def train_flops(c: GptOssConfig, tokens_per_document: float) -> float:
    """Return floating-point operations per trained token: 6 per parameter used (all experts are), and attention."""
    plain, experts = block_parameters(c, c.num_experts)
    used = c.num_layers * (plain + experts) + c.vocab_size * c.hidden_size
    width = c.num_q_heads * c.head_dim
    seen = sum(min(w or tokens_per_document, tokens_per_document / 2) for w in c.window_tokens)
    return 6 * used + 12 * width * seen
