"""What a row says of its figures. The expected values are worked out by hand beside them."""

from __future__ import annotations

import pytest

from tools.bench.goals import AGREED_LOADS, AGREED_OWN, OTHER_LOADS
from tools.bench.rows import Measured, Row, cells, figure, markdown, verdict

FASTER = Row(key="a", work="16 at once", unit="tokens/s", against="vLLM", goal=2.6, floor=2.0)
SOONER = Row(key="b", work="first token", unit="ms", against="vLLM", less_is_better=True, goal=0.5, floor=0.8)
OWN = Row(key="c", work="memory", unit="MB", less_is_better=True, goal=400, floor=800)


@pytest.mark.parametrize(
    ("row", "ours", "theirs", "expected"),
    [
        (FASTER, 260.0, 100.0, "goal"),
        (FASTER, 259.0, 100.0, "floor"),
        (FASTER, 200.0, 100.0, "floor"),
        (FASTER, 199.0, 100.0, "below its floor"),
        (SOONER, 50.0, 100.0, "goal"),
        (SOONER, 80.0, 100.0, "floor"),
        (SOONER, 81.0, 100.0, "below its floor"),
    ],
)
def test_a_ratio_is_judged_on_the_side_that_is_better(row: Row, ours: float, theirs: float, expected: str) -> None:
    assert verdict(row, Measured((ours,), (theirs,))) == expected


@pytest.mark.parametrize(("value", "expected"), [(400.0, "goal"), (800.0, "floor"), (801.0, "below its floor")])
def test_a_figure_of_ours_alone_is_judged_itself(value: float, expected: str) -> None:
    assert verdict(OWN, Measured((value,))) == expected


def test_the_ratio_is_the_median_of_the_rounds_own() -> None:
    """In the second round the machine was half as fast: 2, 4, 2 have the median 2; the medians' ratio would be 4."""
    measured = Measured((200.0, 200.0, 100.0), (100.0, 50.0, 50.0))
    assert cells(FASTER, measured)[2:6] == ("200", "50.0", "2.00", "2.00 – 4.00")


def test_figures_without_a_counterpart_are_not_judged() -> None:
    with pytest.raises(ValueError, match="zip"):
        verdict(FASTER, Measured((1.0, 2.0), (1.0,)))


def test_what_was_not_measured_says_why_and_has_no_figure() -> None:
    missing = Measured(missing="skipped: needs PEER and PEERS")
    assert cells(FASTER, missing) == (
        "16 at once, tokens/s",
        "vLLM",
        *[""] * 4,
        "≥ 2.6×",
        "≥ 2×",
        "skipped: needs PEER and PEERS",
    )


def test_of_a_failure_the_table_has_the_first_line() -> None:
    assert verdict(FASTER, Measured(missing="failed: 3 of 4 requests completed\nbash ...")) == (
        "failed: 3 of 4 requests completed"
    )


def test_a_row_without_goals_has_no_verdict() -> None:
    row = Row(key="d", work="32/256", unit="tokens/s", against="vLLM")
    assert cells(row, Measured((3.0,), (2.0,)))[4:] == ("1.50", "1.50 – 1.50", "", "", "")


@pytest.mark.parametrize(
    ("value", "text"), [(0.126, "0.13"), (9.994, "9.99"), (10.0, "10.0"), (99.94, "99.9"), (1234.5, "1,234")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_markdown() -> None:
    text = markdown({FASTER: Measured((300.0,), (100.0,)), OWN: Measured((500.0,), note="worker 400 MB")})
    lines = text.splitlines()
    assert len({len(line) for line in lines[:4]}) == 1, "columns are aligned"
    assert lines[1].split("|")[2:4] == [" ------- ", " -----: "]
    first, second = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:4])
    assert first == ["16 at once, tokens/s", "vLLM", "300", "100", "3.00", "3.00 – 3.00", "≥ 2.6×", "≥ 2×", "goal"]
    assert second == ["memory, MB", "", "500", "", "", "500 – 500", "≤ 400 MB", "≤ 800 MB", "floor"]
    assert lines[4:] == ["", "- memory: worker 400 MB"]


def test_the_agreed_rows_are_those_of_the_issue() -> None:
    """(goal, floor) in the order of issue 4's table; the executor's share has a row for each of its two sizes."""
    expected = [(2.6, 2), (3, 2), (0.5, 0.8), (3, 2), (1.3, 1), (2.5, 1.5), (0.8, 1), (1.3, 1.6)]
    expected += [(5, 10), (5, 10), (0.9, 0.8), (5, 10), (400, 800)]
    assert [(row.goal, row.floor) for row in (*AGREED_LOADS, *AGREED_OWN)] == expected
    assert [(work.concurrency, work.input_len, work.output_len) for work in AGREED_LOADS.values()] == [
        (16, 256, 128),
        (1, 256, 128),
        (1, 1024, 4),
        (64, 128, 64),
        (1, 256, 128),
        (16, 256, 128),
        (1, 256, 4),
    ]


def test_other_lengths_are_others_and_keys_are_unique() -> None:
    agreed = {(work.input_len, work.output_len) for work in AGREED_LOADS.values()}
    assert not agreed & {(work.input_len, work.output_len) for work in OTHER_LOADS.values()}
    keys = [row.key for row in (*AGREED_LOADS, *AGREED_OWN, *OTHER_LOADS)]
    assert len(keys) == len(set(keys))


def test_a_row_of_llama_cpp_fits_its_slots() -> None:
    """serve.sh gives it 16,384 tokens for 16 slots: 1,024 each, prompt and answer together."""
    for work in [*AGREED_LOADS.values(), *OTHER_LOADS.values()]:
        if work.peer == "llama":
            assert (work.input_len + work.output_len) * (1 + work.spread) <= 1024
