"""Against the naive search over the whole text, however it is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.openai.stop_strings import StopStrings


def naive(text: str, stop: list[str]) -> str | None:
    """The text before the stop string that is complete first, the longest of those complete there."""
    for end in range(1, len(text) + 1):
        found = [len(one) for one in stop if text[:end].endswith(one)]
        if found:
            return text[: end - max(found)]
    return None


def run(pieces: list[str], stop: list[str]) -> tuple[str, bool, list[str]]:
    """The whole text, whether it was stopped, and what went out after each piece."""
    stops, out = StopStrings(stop), []
    for piece in pieces:
        out.append(stops.push(piece))
        if stops.stopped:
            return "".join(out), True, out
    return "".join(out) + stops.flush(), False, out


letters = st.text(alphabet="abc", max_size=6)


@settings(max_examples=1000, deadline=None)
@given(pieces=st.lists(letters, max_size=8), stop=st.lists(letters.filter(bool), max_size=4))
@example(pieces=["ab", "abc"], stop=["abc"])
@example(pieces=["aab", "aac"], stop=["aabaac", "baa"])
def test_as_the_naive_search(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    expected = naive(text, stop)
    found, stopped, out = run(pieces, stop)
    assert stopped is (expected is not None)
    assert found == (text if expected is None else expected)
    # No more is held back than the longest tail that begins a stop string.
    sent = ""
    for index, piece in enumerate(out):
        sent += piece
        before = "".join(pieces[: index + 1])
        if stopped and index == len(out) - 1:
            break
        tails = [before[start:] for start in range(len(before) + 1)]
        held = max(
            (len(tail) for tail in tails if any(one.startswith(tail) and one != tail for one in stop)), default=0
        )
        assert sent == before[: len(before) - held]


@pytest.mark.parametrize(
    ("pieces", "stop", "out", "rest"),
    [
        # A stop string over three tokens, and text behind it in the last one.
        (["Hello E", "N", "D world"], ["END"], ["Hello ", "", ""], None),
        # It begins, and does not end: all comes, the rest at the end of the stream.
        (["Hello E", "N"], ["END"], ["Hello ", ""], "EN"),
        # It begins, turns out another, and the text held back goes out with it.
        (["Hello E", "x"], ["END"], ["Hello ", "Ex"], ""),
        # The first to be complete wins, even if another began earlier.
        (["abcd"], ["abcdef", "bc"], ["a"], None),
        # Of those complete at the same character the longest.
        (["xabc"], ["bc", "abc", "c"], ["x"], None),
        (["no stops"], [], ["no stops"], ""),
    ],
)
def test_by_hand(pieces: list[str], stop: list[str], out: list[str], rest: str | None) -> None:
    stops = StopStrings(stop)
    assert [stops.push(piece) for piece in pieces] == out
    assert stops.stopped is (rest is None)
    assert stops.flush() == (rest or "")
