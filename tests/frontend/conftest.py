"""Shared by the frontend's tests: the two kinds of tokenizer and openai-harmony as an oracle."""

import gzip
import os
from importlib import resources

import pytest

from rose.frontend.o200k import O200kTokenizer


@pytest.fixture(scope="session")
def o200k() -> O200kTokenizer:
    return O200kTokenizer()


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory):
    """openai-harmony 0.0.8 with its vocabulary from the installed package, so that it needs no network."""
    harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed")
    folder = tmp_path_factory.mktemp("encodings")
    packed = resources.files("bpe_openai").joinpath("data", "o200k_base.tiktoken.gz").read_bytes()
    (folder / "o200k_base.tiktoken").write_bytes(gzip.decompress(packed))
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    os.environ.pop("TIKTOKEN_ENCODINGS_BASE")
    if before is not None:
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = before


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory):
    """A model folder whose tokenizer.json is a small byte-level BPE with the Harmony control tokens by name."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    names = ("start", "end", "message", "channel", "constrain", "return", "call", "endoftext")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(f"<|{name}|>", special=True) for name in names],
        show_progress=False,
    )
    text = ["assistant user analysis commentary final json to=functions. the weather in Oslo"] * 20
    tokenizer.train_from_iterator(text, trainer)
    folder = tmp_path_factory.mktemp("small_model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
