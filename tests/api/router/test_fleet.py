"""The fleet: who may be asked, and that nobody is forgotten."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from api.router.fleet import Fleet
from api.router.report import EngineReport

LAYOUT = {"model_digest": "aa", "dtype": "float32"}


def report(engine_id: str, **changed: Any) -> EngineReport:
    role = changed.pop("role", engine_id.partition("-")[0])
    values: dict[str, Any] = {"engine_id": engine_id, "role": role, "epoch": 1, "healthy": True, "kv_layout": LAYOUT}
    return EngineReport(**{**values, **changed})


def url(engine_id: str) -> str:
    return f"http://{engine_id}"


def fleet_of(prefill: int, decode: int, *, alone: str = "decode") -> Fleet:
    """All well. Engine `x-0` is at http://x-0."""
    names = [f"prefill-{i}" for i in range(prefill)], [f"{alone}-{i}" for i in range(decode)]
    fleet = Fleet.of([url(name) for name in names[0]], [url(name) for name in names[1]])
    for name in names[0] + names[1]:
        fleet.probed(url(name), report(name), now=0.0)
    return fleet


def chosen(fleet: Fleet, tried: list[str] | None = None) -> tuple[str | None, str] | None:
    choice = fleet.choose(tried or [])
    if choice is None:
        return None
    return None if choice.prefill is None else choice.prefill.engine_id, choice.decode.engine_id


def test_nobody_is_chosen_before_it_has_answered() -> None:
    fleet = Fleet.of(["http://p"], ["http://d"])
    assert chosen(fleet) is None
    assert not fleet.serving
    assert [(e.engine_id, e.healthy, e.reason) for e in fleet.listing()] == [
        ("http://p", False, "not probed yet"),
        ("http://d", False, "not probed yet"),
    ]


def test_pairs_go_round() -> None:
    fleet = fleet_of(2, 3)
    assert [chosen(fleet) for _ in range(6)] == [
        ("prefill-0", "decode-0"),
        ("prefill-1", "decode-1"),
        ("prefill-0", "decode-2"),
        ("prefill-1", "decode-0"),
        ("prefill-0", "decode-1"),
        ("prefill-1", "decode-2"),
    ]


@given(prefill=st.integers(1, 4), decode=st.integers(1, 4), rounds=st.integers(1, 30))
def test_round_robin_is_fair_to_the_last_request(prefill: int, decode: int, rounds: int) -> None:
    fleet = fleet_of(prefill, decode)
    choices = [chosen(fleet) for _ in range(rounds)]
    for side, engines in ((0, prefill), (1, decode)):
        counts = Counter(choice[side] for choice in choices if choice is not None)
        used = [counts.get(f"{'prefill' if side == 0 else 'decode'}-{i}", 0) for i in range(engines)]
        assert sum(used) == rounds
        assert max(used) - min(used) <= 1


def test_engines_of_role_both_are_used_alone_in_turn() -> None:
    fleet = fleet_of(0, 2, alone="both")
    assert [chosen(fleet) for _ in range(3)] == [(None, "both-0"), (None, "both-1"), (None, "both-0")]


def test_without_a_prefill_engine_decode_goes_alone() -> None:
    fleet = fleet_of(1, 1)
    fleet.silent(url("prefill-0"), "no answer")
    assert chosen(fleet) == (None, "decode-0")
    fleet.probed(url("prefill-0"), report("prefill-0"), 1.0)
    assert chosen(fleet) == ("prefill-0", "decode-0")


def test_an_unhealthy_engine_s_own_reason_is_shown() -> None:
    fleet = fleet_of(1, 1)
    fleet.probed(url("decode-0"), report("decode-0", healthy=False, reason="a step runs for 9 s"), 1.0)
    assert chosen(fleet) is None
    assert fleet.listing()[1].reason == "a step runs for 9 s"


def test_a_prefill_engine_that_nobody_can_read_says_so_with_both_values() -> None:
    fleet = fleet_of(1, 1)
    assert [engine.reason for engine in fleet.listing()] == ["", ""]
    fleet.probed(url("prefill-0"), report("prefill-0", kv_layout={**LAYOUT, "dtype": "bfloat16"}), 1.0)
    prefill = fleet.listing()[0]
    assert prefill.healthy
    assert prefill.reason == "not paired with decode-0: dtype 'bfloat16' here and 'float32' there"


@pytest.mark.parametrize("differing", [{"dtype": "bfloat16"}, {"kv_dtype": "int8"}], ids=str)
def test_engines_of_another_layout_are_no_pair(differing: dict[str, str]) -> None:
    fleet = fleet_of(2, 1)
    fleet.probed(url("prefill-0"), report("prefill-0", kv_layout={**LAYOUT, **differing}), 1.0)
    assert [chosen(fleet) for _ in range(2)] == [("prefill-1", "decode-0")] * 2


def test_a_refused_peer_is_not_paired_until_its_epoch_changes() -> None:
    fleet = fleet_of(1, 1)
    refusing = report("decode-0", incompatible_peers={"prefill-0": "block_size: ours 16, theirs 32"})
    fleet.probed(url("decode-0"), refusing, 1.0)
    assert chosen(fleet) == (None, "decode-0")
    fleet.probed(url("prefill-0"), report("prefill-0", epoch=2), 2.0)
    assert chosen(fleet) == ("prefill-0", "decode-0")
    fleet.probed(url("decode-0"), refusing, 3.0)  # the old refusal, still told: it was of epoch 1
    assert chosen(fleet) == ("prefill-0", "decode-0")
    again = report("decode-0", incompatible_peers={"prefill-0": "block_size: ours 16, theirs 64"})
    fleet.probed(url("decode-0"), again, 4.0)
    assert chosen(fleet) == (None, "decode-0")
    fleet.probed(url("decode-0"), report("decode-0", epoch=2), 5.0)  # decode restarted and has forgotten
    assert chosen(fleet) == ("prefill-0", "decode-0")


def test_a_wrong_role_and_a_doubled_id_keep_an_engine_out() -> None:
    fleet = Fleet.of(["http://p"], ["http://d", "http://e"])
    fleet.probed("http://p", report("decode-9"), 0.0)
    assert fleet.listing()[0].reason == "its role is decode, but the router was given it as --prefill"
    fleet.probed("http://d", report("decode-0"), 0.0)
    fleet.probed("http://e", report("decode-0"), 0.0)
    assert fleet.listing()[2].reason == "http://d has the same engine id decode-0"
    assert chosen(fleet) == (None, "decode-0")


def test_an_engine_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="http://a is given more than once"):
        Fleet.of(["http://a"], ["http://a/"])


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(ValueError, match="localhost:8001 is no engine's URL: write it as http://HOST:PORT"):
        Fleet.of(["http://a"], ["localhost:8001"])


def test_the_second_silent_probe_in_a_row_means_lost() -> None:
    fleet = fleet_of(1, 1)
    assert not fleet.silent(url("prefill-0"), "no answer")
    fleet.probed(url("prefill-0"), report("prefill-0"), 1.0)
    assert not fleet.silent(url("prefill-0"), "no answer")
    assert fleet.silent(url("prefill-0"), "no answer")


def test_an_engine_that_comes_back_gets_no_burst() -> None:
    fleet = fleet_of(1, 2)
    fleet.silent(url("decode-1"), "away")
    for _ in range(50):
        assert chosen(fleet) == ("prefill-0", "decode-0")
    fleet.probed(url("decode-1"), report("decode-1", epoch=2), 1.0)
    assert [chosen(fleet)[1] for _ in range(4)] == ["decode-1", "decode-0", "decode-1", "decode-0"]  # type: ignore[index]


NAMES = ["prefill-0", "prefill-1", "decode-0", "decode-1", "both-0"]


class FleetMachine(RuleBasedStateMachine):
    """Whatever the probes say: only healthy engines, only pairs that fit, and somebody whenever anybody can."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet.of([url(n) for n in NAMES[:2]], [url(n) for n in NAMES[2:]])
        self.told: dict[str, EngineReport | None] = dict.fromkeys(NAMES)

    @rule(
        name=st.sampled_from(NAMES),
        epoch=st.integers(1, 3),
        healthy=st.booleans(),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    )
    def probed(self, name: str, epoch: int, healthy: bool, dtype: str) -> None:
        told = report(name, epoch=epoch, healthy=healthy, kv_layout={**LAYOUT, "dtype": dtype})
        self.fleet.probed(url(name), told, 0.0)
        self.told[name] = told if healthy else None

    @rule(name=st.sampled_from(NAMES))
    def silent(self, name: str) -> None:
        self.fleet.silent(url(name), "silent")
        self.told[name] = None

    @rule(name=st.sampled_from(NAMES))
    def unreachable(self, name: str) -> None:
        self.fleet.unreachable(url(name), "refused")
        self.told[name] = None

    def pairs(self, tried: list[str]) -> list[tuple[str | None, str]]:
        """The reference: every way a request could go, from the last reports alone."""
        well = {name: told for name, told in self.told.items() if told is not None and name not in tried}
        layouts = {name: told.kv_layout for name, told in well.items()}
        pairs: list[tuple[str | None, str]] = [
            (p, d) for p in NAMES[:2] for d in NAMES[2:4] if p in well and d in well and layouts[p] == layouts[d]
        ]
        pairs += [(None, "both-0")] if "both-0" in well else []
        return pairs or [(None, d) for d in NAMES[2:4] if d in well]

    @rule(tried=st.lists(st.sampled_from(NAMES), max_size=3))
    def choose(self, tried: list[str]) -> None:
        possible = self.pairs(tried)
        choice = chosen(self.fleet, [url(name) for name in tried])
        assert choice in possible if possible else choice is None

    @invariant()
    def serves_while_somebody_can_decode(self) -> None:
        assert self.fleet.serving == any(self.told[name] is not None for name in NAMES[2:])


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
