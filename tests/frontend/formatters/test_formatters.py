"""The formatters plain and tokens, and formatters by name."""

import subprocess
import sys

import pytest

from rose.frontend.formatters.base import FormatError
from rose.frontend.formatters.registry import FORMATTERS, build_formatter
from rose.frontend.tokenizer import load_tokenizer
from rose.utils.errors import CheckpointError, ConfigError


def test_every_name_builds_its_formatter(o200k):
    assert [build_formatter(name, o200k).name for name in FORMATTERS] == list(FORMATTERS)


def test_an_unknown_name_is_answered_with_the_known_ones(o200k):
    with pytest.raises(ConfigError, match="harmony, plain, tokens"):
        build_formatter("chatml", o200k)


def test_plain_text_goes_through(o200k):
    formatter = build_formatter("plain", o200k)
    prompt = formatter.encode({"prompt": "hello<|end|> world"})
    assert prompt.token_ids == o200k.encode("hello<|end|> world")
    assert prompt.stop_token_ids == [200002, 200012, 199999]
    assert formatter.encode({"prompt": [1, 2]}).token_ids == [1, 2]


def test_plain_answers_leave_control_tokens_out_and_hold_back_broken_characters(o200k):
    decoder = build_formatter("plain", o200k).decoder()
    pieces = [d.text for i in [220, 172, 254, 106, 115, 200007, 64, 172] for d in decoder.push([i])]
    assert pieces == [" ", "𠮷", "a"]
    assert [d.text for d in decoder.finish("length")] == ["\ufffd"]
    assert (decoder.answer().content, decoder.answer().finish_reason) == (" 𠮷a\ufffd", "length")


def test_tokens_are_the_identity(o200k):
    formatter = build_formatter("tokens", o200k)
    assert formatter.encode({"prompt": [5, 200006]}).token_ids == [5, 200006]
    decoder = formatter.decoder()
    assert [d.token_ids for d in decoder.push([1, 2])] == [[1, 2]]
    assert decoder.push([]) == decoder.finish("stop") == []
    assert decoder.answer().token_ids == [1, 2]


@pytest.mark.parametrize("prompt", [None, [], [1.5], [True], [-1], ["a"], {}])
@pytest.mark.parametrize("name", ["plain", "tokens"])
def test_a_prompt_that_is_none_is_explained(o200k, name, prompt):
    with pytest.raises(FormatError, match="prompt: found"):
        build_formatter(name, o200k).encode({"prompt": prompt})


def test_harmony_needs_its_control_tokens(small_folder, tmp_path):
    spec = (small_folder / "tokenizer.json").read_text().replace("<|constrain|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(spec)
    with pytest.raises(CheckpointError, match=r"<\|constrain\|> is needed"):
        build_formatter("harmony", load_tokenizer(tmp_path))


def test_formatters_import_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; "
        "import rose.frontend.formatters.registry; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
