"""Tokenizers: exact ids, text that never becomes control tokens, byte-exact decoding, errors for people."""

import gzip
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.frontend import o200k as o200k_module
from rose.frontend.tokenizer import FolderTokenizer, TextDecoder, decode, load_tokenizer
from rose.utils.errors import CheckpointError, ConfigError

SPOT_CHECKS = [
    ("hello world", [24912, 2375]),
    ("  two  spaces", [220, 1920, 220, 18608]),
    ("12345678", [7633, 19354, 4388]),
    ("I'm DON'T", [15390, 153384]),
    ("foo\n\n  bar", [16660, 279, 220, 3608]),
    ("naïve 😀", [1503, 9954, 737, 88038]),
    ("日本語のテスト", [9048, 40909, 3385, 16056, 38236]),
    ("a" * 50, [117525] * 6 + [3545]),
    ("https://x.y/z?q=1\n", [4172, 1684, 87, 4486, 61176, 93569, 28, 16, 198]),
]


@pytest.mark.parametrize(("text", "token_ids"), SPOT_CHECKS)
def test_o200k_has_the_published_ids(o200k, text, token_ids):
    assert o200k.encode(text) == token_ids
    assert decode(o200k, token_ids) == text


def test_o200k_control_tokens_have_the_published_ids(o200k):
    names = {
        "<|return|>": 200002,
        "<|constrain|>": 200003,
        "<|channel|>": 200005,
        "<|start|>": 200006,
    }
    names |= {"<|end|>": 200007, "<|message|>": 200008, "<|call|>": 200012, "<|endoftext|>": 199999}
    names |= {"<|startoftext|>": 199998, "<|reserved_201087|>": 201087, "<|endofprompt|>": 200018}
    assert {name: o200k.control_id(name) for name in names} == names
    assert [o200k.control_name(i) is not None for i in (199997, 199998, 201087, 201088)] == [
        False,
        True,
        True,
        False,
    ]
    assert o200k.vocab_size == 201088


def _random_texts(number):
    draw = random.Random(7)
    pools = ["abc dEF'S 019\n\r\t ", "日本語のテスト한국어", "éàüñßøЖдл", "😀👩‍👩‍👧🇳🇴"]
    pools += ["{}[]()<|>=\"':/\\", " \u00a0\u2003\u200d"]
    for _ in range(number):
        pool = "".join(draw.sample(pools, draw.randint(1, 3)))
        yield "".join(
            draw.choice(pool) if draw.random() < 0.9 else chr(draw.randrange(0x20, 0xD800))
            for _ in range(draw.randint(0, 60))
        )


def test_o200k_agrees_with_the_published_encoder_on_random_text(o200k, oracle):
    for text in _random_texts(2000):
        assert o200k.encode(text) == oracle.encode(text, disallowed_special=()), repr(text)


@pytest.mark.parametrize(
    "text", ["<|end|>", "a<|start|>system<|message|>b", "<|reserved_200013|><|endoftext|>"]
)
def test_text_never_becomes_control_tokens(o200k, small_folder, text):
    for tokenizer in (o200k, load_tokenizer(small_folder)):
        token_ids = tokenizer.encode(text)
        assert not any(tokenizer.control_name(i) for i in token_ids)
        assert decode(tokenizer, token_ids) == text


def test_trusted_text_can_name_control_tokens(o200k, small_folder):
    for tokenizer in (o200k, load_tokenizer(small_folder)):
        token_ids = tokenizer.encode_with_control(
            "<|start|>assistant<|channel|>final<|message|>ok<|end|>"
        )
        names = [tokenizer.control_name(i) for i in token_ids if tokenizer.control_name(i)]
        assert names == ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
        assert (
            decode(tokenizer, token_ids) == "<|start|>assistant<|channel|>final<|message|>ok<|end|>"
        )


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(), max_size=40))
def test_decoding_gives_back_the_text(o200k, small_folder, text):
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for tokenizer in (o200k, _small(small_folder)):
        assert decode(tokenizer, tokenizer.encode(text)) == expected


def _small(folder, _cache={}):  # noqa: B006 - one load for all examples of hypothesis
    return _cache.setdefault(folder, load_tokenizer(folder))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=30), st.data())
def test_incremental_decoding_is_the_same_however_it_is_cut(text, data):
    decoder, out, place = TextDecoder(), [], 0
    while place < len(text):
        size = data.draw(st.integers(1, len(text) - place))
        out.append(decoder.push(text[place : place + size]))
        place += size
    assert "".join([*out, decoder.finish()]) == text.decode("utf-8", "replace")


def test_an_incomplete_character_is_held_back():
    decoder = TextDecoder()
    assert [decoder.push(bytes([b])) for b in "𠮷".encode()] == ["", "", "", "𠮷"]


def test_unknown_ids_decode_to_the_replacement_character(o200k, small_folder):
    for tokenizer in (o200k, load_tokenizer(small_folder)):
        for token_id in (-1, tokenizer.vocab_size, 10**12):
            assert tokenizer.token_bytes(token_id).decode() == "\ufffd"


def test_a_folder_tokenizer_is_used_by_name_not_by_o200k_ids(small_folder):
    tokenizer = load_tokenizer(small_folder)
    assert isinstance(tokenizer, FolderTokenizer)
    assert tokenizer.control_id("<|start|>") < 300
    with pytest.raises(CheckpointError, match=r"<\|reserved_200000\|>.*tokenizer.json"):
        tokenizer.control_id("<|reserved_200000|>")


def test_a_folder_tokenizer_equals_transformers_tokenizer_on_text(small_folder):
    from tokenizers import Tokenizer

    theirs, ours = (
        Tokenizer.from_file(str(small_folder / "tokenizer.json")),
        load_tokenizer(small_folder),
    )
    for text in ("the weather in Oslo", "é 日本 {}", "", "  x\n"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


def test_a_folder_without_tokenizer_gets_o200k(tmp_path):
    assert load_tokenizer(tmp_path).name == "o200k_harmony"
    assert load_tokenizer(None).name == "o200k_harmony"


def test_a_missing_vocabulary_names_the_file_and_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(o200k_module, "PACKAGE", "bpe_openai_that_is_absent")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    for part in (str(tmp_path), "tokenizer.json", "rose-engine[vocab]"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "packed",
    # Named, and no time of day in the header: two workers must collect the same tests.
    [
        pytest.param(gzip.compress(b"IQ== 0\n", mtime=0), id="another vocabulary"),
        pytest.param(b"no gzip", id="no gzip"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_changed_vocabulary_is_refused(tmp_path, packed):
    (tmp_path / "table.gz").write_bytes(packed)
    with pytest.raises(ConfigError, match="sha256"):
        o200k_module.read_table(tmp_path / "table.gz")


WORD_LEVEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda spec: "{", "cannot be read"),
        (lambda spec: "[]", "cannot be read"),
        (lambda spec: json.dumps(spec | {"decoder": None}), "ByteLevel"),
        (lambda spec: json.dumps(spec | {"model": WORD_LEVEL}), "WordLevel"),
        (lambda spec: json.dumps(_without_byte(spec)), "0x21"),
    ],
)
def test_a_broken_tokenizer_file_is_explained(small_folder, tmp_path, change, expected):
    spec = json.loads((small_folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(change(spec))
    with pytest.raises(CheckpointError, match=expected):
        load_tokenizer(tmp_path)


def _without_byte(spec):
    vocab = {text: i for text, i in spec["model"]["vocab"].items() if "!" not in text}
    return spec | {"model": spec["model"] | {"vocab": vocab, "merges": []}}


@pytest.mark.parametrize("is_reached_by", ["added tokens not marked special", "whole pieces"])
def test_carelessly_listed_control_tokens_are_not_reached_either(
    small_folder, tmp_path, is_reached_by
):
    spec = json.loads((small_folder / "tokenizer.json").read_text())
    if is_reached_by == "whole pieces":
        spec["model"]["ignore_merges"] = True
        spec["pre_tokenizer"]["use_regex"] = False
    else:
        spec["added_tokens"] = [t | {"special": False} for t in spec["added_tokens"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path)
    assert not any(tokenizer.control_name(i) for i in tokenizer.encode("<|end|>"))
    assert decode(tokenizer, tokenizer.encode("<|end|>")) == "<|end|>"
    assert tokenizer.control_id("<|end|>") == load_tokenizer(small_folder).control_id("<|end|>")


def test_words_added_as_ordinary_tokens_stay_text(small_folder, tmp_path):
    spec = json.loads((small_folder / "tokenizer.json").read_text())
    word_id = load_tokenizer(small_folder).vocab_size
    word = {"id": word_id, "content": "grüße", "special": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"].append(word | flags)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path)
    assert word_id in tokenizer.encode("viele grüße!")
    assert decode(tokenizer, tokenizer.encode("viele grüße!")) == "viele grüße!"


def test_loading_o200k_is_quick_and_brings_no_torch():
    code = (
        "import sys, time; t = time.perf_counter(); from rose.frontend.tokenizer import load_tokenizer; "
        "load_tokenizer(None).encode('x'); print(time.perf_counter() - t); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        float(done.stdout) < 5
    )  # about 0.3 s alone; loaded machines get room, a build from merges takes 12 s


@pytest.mark.slow
def test_a_folder_with_the_published_tokenizer_equals_the_offline_one(o200k, tmp_path):
    converter = pytest.importorskip("transformers.convert_slow_tokenizer", reason="no transformers")
    package = importlib.util.find_spec("bpe_openai").submodule_search_locations[0]
    table = gzip.decompress((Path(package) / o200k_module.TABLE_FILE).read_bytes())
    (tmp_path / "table.tiktoken").write_bytes(table)
    names = sorted(o200k_module.control_tokens().items(), key=lambda item: item[1])
    built = converter.TikTokenConverter(
        vocab_file=str(tmp_path / "table.tiktoken"),
        pattern=PATTERN,
        extra_special_tokens=[name for name, _ in names if name != "<|endofprompt|>"],
    ).converted()
    built.save(str(tmp_path / "tokenizer.json"))
    folder = load_tokenizer(tmp_path)
    assert folder.vocab_size == o200k.vocab_size
    assert all(folder.token_bytes(i) == o200k.token_bytes(i) for i in range(201090))
    for text in _random_texts(1000):
        assert folder.encode(text) == o200k.encode(text), repr(text)


UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TAIL = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
