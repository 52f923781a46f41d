"""Token sequences from well-formed to absurd: nothing raises, no text is lost, a stream equals the whole answer."""

import pytest

from fakes import harmony_fuzz
from rose.frontend.formatters.harmony import header
from rose.frontend.formatters.harmony.parse import HarmonyParser

KINDS = {
    *("stop_between_messages", "missing_start", "repeated_start", "control_token_in_content"),
    *("missing_end", "odd_header", "missing_message"),
}


@pytest.mark.parametrize("seed", range(4))
def test_2000_sequences_a_seed(o200k, seed):
    checker = harmony_fuzz.run(o200k, seed=seed, count=2000)
    assert checker.recoveries.keys() == KINDS, "the fuzzer no longer meets every leniency"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_million_sequences(o200k, seed):
    harmony_fuzz.run(o200k, seed=seed, count=50_000)


def _lose_held_tokens(self, events):
    self._held = []


def _lose_second_recipients(words, _take=header._take_recipient):
    recipient, words, _ = _take(words)
    return recipient, words, []


def _fail_on_an_old_id(self, token_id):
    return {}[token_id]


@pytest.mark.parametrize(
    ("place", "name", "broken", "word"),
    [
        (HarmonyParser, "_release", _lose_held_tokens, "lost|is not in"),
        (header, "_take_recipient", _lose_second_recipients, "lost"),
        (HarmonyParser, "_is_other_control", _fail_on_an_old_id, "KeyError"),
    ],
)
def test_the_fuzzer_finds_a_parser_that_fails(o200k, monkeypatch, place, name, broken, word):
    monkeypatch.setattr(place, name, broken)
    with pytest.raises(AssertionError, match=word):
        harmony_fuzz.run(o200k, seed=6, count=20_000)


def test_a_seed_makes_the_same_sequences_again(o200k):
    first, again = (harmony_fuzz.Generator(o200k, 7).sequences() for _ in range(2))
    assert [next(first) for _ in range(200)] == [next(again) for _ in range(200)]
