"""A request's way, step by step, and whatever the engines do."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages.errors import RefusalReason
from api.router.route import AskDecode, AskPrefill, Effect, PassOn, Refuse, Reply, Route
from tests.api.router.test_fleet import fleet_of, report, url

TICKET = {"ticket": "sealed"}
FULL = Reply(429, "queue_full", None, 7.0)


def told(effect: Effect) -> tuple[Any, ...]:
    match effect:
        case AskPrefill():
            return "prefill", effect.engine.engine_id, effect.seconds
        case AskDecode():
            return "decode", effect.engine.engine_id, effect.ticket, effect.seconds
        case Refuse():
            return "refuse", effect.reason.value, effect.retry_after
        case PassOn():
            return ("pass on",)


def route_of(prefill: int, decode: int, seconds: float = 100.0) -> Route:
    return Route(fleet_of(prefill, decode), deadline=seconds)


def test_prefill_then_decode_with_the_ticket() -> None:
    route = route_of(1, 1)
    assert told(route.start(0.0)) == ("prefill", "prefill-0", 50.0)
    assert told(route.prefilled(TICKET, 30.0)) == ("decode", "decode-0", TICKET, 70.0)
    assert route.retries == []


def test_one_request_after_the_other_goes_round_on_both_sides() -> None:
    fleet, asked = fleet_of(2, 2), []
    for _ in range(4):
        route = Route(fleet, deadline=100.0)
        asked += [told(route.start(0.0))[1], told(route.prefilled(TICKET, 0.0))[1]]
    assert asked == ["prefill-0", "decode-0", "prefill-1", "decode-1"] * 2


def test_each_silent_prefill_engine_has_half_of_what_remains_and_at_most_two_have() -> None:
    route = route_of(3, 1)
    assert told(route.start(0.0)) == ("prefill", "prefill-0", 50.0)
    assert told(route.failed("timeout", 50.0)) == ("prefill", "prefill-1", 25.0)
    assert told(route.failed("timeout", 75.0)) == ("decode", "decode-0", None, 25.0)
    assert route.retries == ["timeout", "timeout"]


def test_a_prefill_engine_that_fails_is_replaced_then_done_without() -> None:
    route = route_of(2, 1)
    route.start(0.0)
    assert told(route.replied(Reply(500), 1.0))[:2] == ("prefill", "prefill-1")
    assert told(route.failed("disconnected", 2.0)) == ("decode", "decode-0", None, 98.0)


def test_an_unreachable_engine_is_out_for_others_too() -> None:
    route = route_of(2, 1)
    route.start(0.0)
    route.failed("unreachable", 0.0)
    assert [engine.healthy for engine in route.fleet.engines] == [False, True, True]


def test_a_wrong_request_is_passed_on_from_either_side() -> None:
    for status in (400, 404, 413, 422):
        prefill = route_of(2, 2)
        prefill.start(0.0)
        assert told(prefill.replied(Reply(status), 1.0)) == ("pass on",)
        decode = route_of(1, 2)
        decode.start(0.0)
        decode.prefilled(TICKET, 1.0)
        assert told(decode.replied(Reply(status), 2.0)) == ("pass on",)


def test_a_refused_key_between_router_and_engine_is_not_the_client_s() -> None:
    route = route_of(1, 1)
    route.start(0.0)
    assert told(route.replied(Reply(401, "invalid_api_key"), 1.0))[:3] == ("decode", "decode-0", None)
    assert told(route.replied(Reply(401, "invalid_api_key"), 1.0)) == ("refuse", "engine_unavailable", 1.0)


def test_429_only_when_every_engine_is_full_with_the_shortest_wait() -> None:
    route = route_of(2, 1)
    route.start(0.0)
    assert told(route.replied(FULL, 1.0))[:2] == ("prefill", "prefill-1")
    assert told(route.replied(Reply(429, retry_after=3.0), 1.0)) == ("refuse", "queue_full", 3.0)
    assert route.retries == ["full"]


def test_full_decode_engines() -> None:
    route = route_of(1, 2)
    route.start(0.0)
    route.prefilled(TICKET, 1.0)
    assert told(route.replied(FULL, 1.0))[:3] == ("decode", "decode-1", TICKET)
    assert told(route.replied(Reply(503), 1.0)) == ("refuse", "queue_full", 7.0)


def test_the_same_ticket_once_more_then_recompute_then_503() -> None:
    route = route_of(1, 3)
    route.start(0.0)
    route.prefilled(TICKET, 0.0)
    assert told(route.failed("disconnected", 1.0)) == ("decode", "decode-1", TICKET, 99.0)
    assert told(route.replied(Reply(503), 2.0)) == ("decode", "decode-2", None, 98.0)
    refuse = route.failed("lost", 3.0)
    assert told(refuse) == ("refuse", "engine_unavailable", 1.0)
    assert isinstance(refuse, Refuse)
    assert refuse.text == (
        "no engine can take the request (decode-0: disconnected; decode-1: it answered 503; decode-2: lost)"
    )


def test_a_refused_ticket_costs_the_client_a_recompute_not_an_error() -> None:
    route = route_of(1, 1)
    route.start(0.0)
    route.prefilled(TICKET, 0.0)
    refused = Reply(400, "invalid_request", "kv_transfer_params.ticket")
    assert told(route.replied(refused, 1.0)) == ("decode", "decode-0", None, 99.0)
    assert told(route.replied(refused, 1.0)) == ("pass on",)  # then it cannot have been the ticket


def test_an_answer_without_a_ticket_is_recomputed() -> None:
    route = route_of(1, 1)
    route.start(0.0)
    assert told(route.prefilled(None, 1.0)) == ("decode", "decode-0", None, 99.0)
    assert route.retries == ["no_ticket"]


def test_what_the_operator_or_the_clock_decided_is_not_tried_again() -> None:
    for reply in (Reply(502, "kv_load_failed"), Reply(504, "deadline_exceeded")):
        route = route_of(1, 2)
        route.start(0.0)
        route.prefilled(TICKET, 1.0)
        assert told(route.replied(reply, 2.0)) == ("pass on",)


def test_a_ticket_goes_only_to_an_engine_that_can_read_it() -> None:
    route = route_of(1, 2)
    route.start(0.0)
    for name in ("decode-0", "decode-1"):
        route.fleet.probed(url(name), report(name, kv_layout={"dtype": "bfloat16"}), 0.5)
    assert told(route.prefilled(TICKET, 1.0))[2] is None


def test_nobody_there_and_no_time() -> None:
    assert told(route_of(0, 0).start(0.0)) == ("refuse", "engine_unavailable", 1.0)
    assert told(route_of(1, 1).start(100.0)) == ("refuse", "deadline_exceeded", None)
    route = route_of(1, 1)
    route.start(0.0)
    assert told(route.failed("timeout", 100.0)) == ("refuse", "deadline_exceeded", None)


ANSWERS = st.sampled_from(
    [
        "ticket",
        "no ticket",
        "unreachable",
        "disconnected",
        "lost",
        "timeout",
        "malformed",
        Reply(400),
        Reply(400, "invalid_request", "kv_transfer_params"),
        Reply(401),
        FULL,
        Reply(500),
        Reply(502, "kv_load_failed"),
        Reply(503),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    prefill=st.integers(0, 3),
    decode=st.integers(0, 3),
    sick=st.sets(st.integers(0, 5)),
    answers=st.lists(ANSWERS, min_size=20, max_size=20),
    durations=st.lists(st.floats(0.0, 60.0), min_size=20, max_size=20),
)
def test_every_route_ends_and_asks_only_whom_it_may(
    prefill: int, decode: int, sick: set[int], answers: list[Any], durations: list[float]
) -> None:
    fleet = fleet_of(prefill, decode)
    for place in sick:
        if place < len(fleet.engines):
            fleet.unreachable(fleet.engines[place].url, "sick")
    route, now = Route(fleet, deadline=100.0), 0.0
    effect, asked = route.start(now), []
    for answer, duration in zip(answers, durations, strict=True):
        if not isinstance(effect, AskPrefill | AskDecode):
            break
        engine = effect.engine
        assert engine.healthy
        assert engine.side == ("prefill" if isinstance(effect, AskPrefill) else "decode")
        assert now < 100.0
        assert 0 < effect.seconds <= 100.0 - now
        if isinstance(effect, AskPrefill):
            assert effect.seconds == (100.0 - now) / 2
        asked.append(engine.url)
        now = now + effect.seconds if answer == "timeout" else now + min(duration, effect.seconds)
        if isinstance(answer, Reply):
            effect = route.replied(answer, now)
        elif answer in ("ticket", "no ticket"):
            if isinstance(effect, AskDecode):
                return  # answered
            effect = route.prefilled(TICKET if answer == "ticket" else None, now)
        else:
            effect = route.failed(answer, now)
    assert isinstance(effect, PassOn | Refuse)
    assert all(asked.count(one) <= 2 for one in asked)
    assert len(asked) <= prefill + decode + 1
    if isinstance(effect, Refuse) and effect.reason is RefusalReason.DEADLINE_EXCEEDED:
        assert now >= 100.0


def test_a_request_that_an_operator_ended_is_taken_up_by_nobody() -> None:
    route = route_of(2, 2)
    route.start(0.0)
    assert told(route.replied(Reply(503, "aborted"), 1.0)) == ("pass on",)
    route = route_of(2, 2)
    route.start(0.0)
    route.prefilled(TICKET, 1.0)
    assert told(route.replied(Reply(503, "aborted"), 2.0)) == ("pass on",)
    assert route.retries == []
