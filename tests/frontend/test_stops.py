"""Stop strings: found across any cut of the text, never sent, nothing else lost."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rose.frontend.stops import StopStrings


def _run(pieces, strings):
    stops = StopStrings(strings)
    sent = "".join(stops.push(piece) for piece in pieces)
    return sent + stops.finish(), stops.matched


def test_a_string_is_found_across_pieces():
    assert _run(["abS", "T", "OPcd"], ["STOP"]) == ("ab", "STOP")


def test_what_only_looked_like_a_stop_is_sent():
    assert _run(["abS", "T", "Ocd"], ["STOP"]) == ("abSTOcd", None)
    assert _run(["abST"], ["STOP"]) == ("abST", None)


def test_no_more_than_a_possible_beginning_is_held():
    stops = StopStrings(["STOP"])
    assert stops.push("hello S") == "hello "
    assert stops.push("ad") == "Sad"


@given(
    text=st.text("ab", max_size=30),
    strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=10),
)
def test_any_cut_gives_what_a_search_of_the_whole_text_gives(text, strings, cuts):
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    found = sorted((text.find(s) + len(s), text.find(s), s) for s in strings if s in text)
    expected = (text[: found[0][1]], found[0][2]) if found else (text, None)
    assert _run(pieces, strings) == expected
