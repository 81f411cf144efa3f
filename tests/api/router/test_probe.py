"""What the router's log says of engines that come and go. The network and the clock are the test's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
import pytest

from api.router.fleet import Fleet
from api.router.probe import LOADING_SECONDS, Prober
from api.router.upstream import Upstream, UpstreamFailed
from api.router.waits import Waits
from tests.api.router.test_fleet import report, url

PREFILL, DECODE = url("prefill-0"), url("decode-0")
REFUSED = f"no connection to {DECODE}/debug/engine: Cannot connect to host decode-0"


class Network(Upstream):
    """`answers`: URL of an engine → status and body; who is not in it refuses the connection."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        engine = url.removesuffix("/debug/engine")
        if engine not in self.answers:
            raise UpstreamFailed("unreachable", f"no connection to {url}: Cannot connect to host {engine[7:]}")
        return self.answers[engine]


class Start:
    """A router that has just started, with one engine of each side, and what it logs from then on."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "api.router.probe")
        self.now, self.network, self._caplog = 100.0, Network(), caplog
        fleet = Fleet.of([PREFILL], [DECODE])
        self.prober = Prober(fleet, self.network, Waits(), interval=1.0, clock=lambda: self.now)

    def loaded(self, engine_id: str) -> None:
        self.network.answers[url(engine_id)] = (200, msgspec.json.encode(report(engine_id)))

    async def probe(self, *urls: str) -> list[tuple[str, str]]:
        """Level and text of the lines that these probes bring."""
        for each in urls:
            await self.prober.probe(each)
        lines = [(record.levelname, record.getMessage()) for record in self._caplog.records]
        self._caplog.clear()
        return lines


async def test_a_start_of_engines_that_load_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    router = Start(caplog)
    assert await router.probe(PREFILL, DECODE) == [
        ("INFO", f"waiting for engine url={PREFILL}"),
        ("INFO", f"waiting for engine url={DECODE}"),
    ]
    router.now += LOADING_SECONDS - 0.1
    assert await router.probe(PREFILL, DECODE) == [], "once each"
    router.loaded("prefill-0")
    router.loaded("decode-0")
    assert await router.probe(PREFILL, DECODE) == [
        ("INFO", "engine engine_id=prefill-0 healthy=True reason=-"),
        ("INFO", "engine engine_id=decode-0 healthy=True reason=-"),
    ]


async def test_one_that_never_comes_is_warned_of_when_its_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    router = Start(caplog)
    await router.probe(DECODE)
    router.now += LOADING_SECONDS
    warning = ("WARNING", f"engine engine_id={DECODE} healthy=False reason={REFUSED}")
    assert await router.probe(DECODE) == [warning]
    assert await router.probe(DECODE) == []


async def test_one_that_was_well_is_warned_of_at_once(caplog: pytest.LogCaptureFixture) -> None:
    router = Start(caplog)
    router.loaded("decode-0")
    assert await router.probe(DECODE) == [("INFO", "engine engine_id=decode-0 healthy=True reason=-")]
    router.network.answers.clear()
    router.now += 1.0
    assert await router.probe(DECODE) == [("WARNING", f"engine engine_id=decode-0 healthy=False reason={REFUSED}")]


async def test_an_answer_that_is_wrong_is_not_taken_for_loading(caplog: pytest.LogCaptureFixture) -> None:
    """An engine answers when it is loaded: waiting mends neither a wrong key nor a wrong role."""
    router = Start(caplog)
    router.network.answers[DECODE] = (401, b"")
    reason = f"{DECODE}/debug/engine answered 401: wrong API key"
    assert await router.probe(DECODE) == [("WARNING", f"engine engine_id={DECODE} healthy=False reason={reason}")]
    router.network.answers[PREFILL] = (200, msgspec.json.encode(report("decode-7")))
    reason = "its role is decode, but the router was given it as --prefill"
    assert await router.probe(PREFILL) == [("WARNING", f"engine engine_id=decode-7 healthy=False reason={reason}")]
