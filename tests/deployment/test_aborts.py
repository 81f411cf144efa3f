"""Clients that leave at random moments, from a seed: nothing of them stays, and those who stay get their right text.

A quarter each leaves after a random time, at a random event of its stream, when its prompt is seen to be computed, and
when its blocks are seen to be on their way. Every tenth client stays to the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import anyio
import msgspec
import pytest

from tests.deployment.clients import MODEL, Question, ask, expected, in_background, prompt_of
from tests.deployment.harness import Deployment
from tests.deployment.modes import DEPTH_3, PRIORITY, SMALL

SEED = 20
AT_ONCE = 8
REFERENCES = ("prose-5", "prose-16", "prose-17", "prose-48", "random-7", "chat-1", "chat-2", "chat-3")
VOCABULARY = range(17, 49152)
MAX_TOKENS = 10
PATIENCE_S = 60.0
FLAGS = ("--dtype=float32", "--fault=slow:0.5,slow_s:0.4", "--lease=10", "--lease-renewal=2")
MODES = {"tcp": (*DEPTH_3, *PRIORITY), "nixl": SMALL}

LEAVES = ("by time", "at an event", "in prefill", "in a load")
STATES = {"in prefill": ("prefill-0", ("queued", "prefill")), "in a load": ("decode-0", ("waiting_for_remote_kvs",))}


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    with Deployment(*FLAGS, f"--transport={request.param}", *MODES[request.param]) as running:
        yield running


class Visit(msgspec.Struct, frozen=True):
    """One client: what it asks, and when it leaves. `reference`: it stays."""

    number: int
    prompt: list[int]
    stream: bool
    leaves: str
    after_s: float
    after_events: int
    reference: str | None

    @property
    def request_id(self) -> str:
        return f"visit-{self.number}"

    def body(self) -> dict[str, object]:
        body = Question(self.prompt, max_tokens=MAX_TOKENS, stream=self.stream, timeout=PATIENCE_S).body()
        return {**body, "model": MODEL}


def visits(seed: int, count: int) -> Iterator[Visit]:
    chance = random.Random(seed)
    for number in range(count + count // 9):
        reference = chance.choice(REFERENCES) if number % 10 == 9 else None
        leaves = "stays" if reference else LEAVES[number % len(LEAVES)]
        yield Visit(
            number=number,
            prompt=prompt_of(reference) if reference else chance.choices(VOCABULARY, k=chance.randrange(1, 50)),
            stream=leaves == "at an event" or chance.random() < 0.5,
            leaves=leaves,
            after_s=10 ** chance.uniform(-3, 0.3),
            after_events=chance.randrange(1, MAX_TOKENS),
            reference=reference,
        )


class Crowd:
    """Sends the visits, a few at once, and counts how they ended."""

    def __init__(self, deployment: Deployment, session: aiohttp.ClientSession) -> None:
        self._url, self._session = deployment.url, session
        self._engines = {engine["engine_id"]: engine["url"] for engine in deployment.engines()}
        self.ended: Counter[str] = Counter()

    async def send(self, todo: Iterator[Visit]) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(self._one_after_another, todo)

    async def _one_after_another(self, todo: Iterator[Visit]) -> None:
        for visit in todo:
            with anyio.fail_after(PATIENCE_S):
                self.ended[await self._visit(visit)] += 1

    async def _visit(self, visit: Visit) -> str:
        how = visit.leaves
        async with anyio.create_task_group() as tasks:

            async def leave() -> None:
                await self._cue(visit)
                tasks.cancel_scope.cancel()

            if how in ("by time", *STATES):
                tasks.start_soon(leave)
            async with self._answer(visit) as answer:
                assert answer.status == 200, await answer.text()
                events, text, whole = 0, "", False
                async for line in answer.content:
                    data = line.removeprefix(b"data: ").strip()
                    events += bool(data)
                    if how == "at an event" and events == visit.after_events:
                        break
                    if data == b"[DONE]":
                        whole = True
                    elif data:
                        message = msgspec.json.decode(data)
                        text += "".join(choice["text"] for choice in message["choices"])
                        whole = not visit.stream
                else:
                    assert whole, text
                    if visit.reference is not None:
                        assert text == expected(visit.reference, MAX_TOKENS)
                    how = "answered"
            tasks.cancel_scope.cancel()
        return how

    @asynccontextmanager
    async def _answer(self, visit: Visit) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"X-Request-ID": visit.request_id}
        answer = await self._session.post(f"{self._url}/v1/completions", json=visit.body(), headers=headers)
        try:
            yield answer
        finally:
            answer.close()

    async def _cue(self, visit: Visit) -> None:
        if visit.leaves == "by time":
            await anyio.sleep(visit.after_s)
            return
        engine_id, reasons = STATES[visit.leaves]
        while True:
            story = f"{self._engines[engine_id]}/debug/requests/{visit.request_id}"
            async with self._session.get(story) as answer:
                if answer.status == 200 and (await answer.json())["intervals"][-1]["reason"] in reasons:
                    return
            await anyio.sleep(0.01)


async def leave_in_numbers(deployment: Deployment, seed: int, count: int) -> None:
    before = deployment.engines()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        crowd = Crowd(deployment, session)
        await crowd.send(visits(seed, count))
    # Not all find their moment; of each kind most do, and all who stay are answered.
    assert crowd.ended["answered"] < count // 2, crowd.ended
    assert all(crowd.ended[leaves] >= count // 20 for leaves in LEAVES), crowd.ended
    assert crowd.ended.total() == count + count // 9
    deployment.wait_quiet()
    for engine in before:
        after = deployment.engine(engine["engine_id"])
        assert (after["epoch"], after["pid"], after["healthy"]) == (engine["epoch"], engine["pid"], True)
        assert deployment.metric(engine["engine_id"], "kvyard_requests_total", outcome="abort") > 0
        for gauge in ("running", "waiting", "skipped"):
            assert deployment.metric(engine["engine_id"], f"kvyard_requests_{gauge}") == 0
    landed = deployment.metric("decode-0", "kvyard_kv_loads_total", outcome="landed")
    fresh = {name: in_background(deployment.url, Question(prompt_of(name))) for name in ("prose-100", "random-64")}
    for name, client in fresh.items():
        client.result().must_be(expected(name, 16))
    assert deployment.metric("decode-0", "kvyard_kv_loads_total", outcome="landed") == landed + len(fresh)
    ask(deployment.url, Question(prompt_of("prose-48"))).must_be(expected("prose-48", 16))
    deployment.wait_quiet()


async def test_100_clients_of_each_transport_leave_at_random_moments(deployment: Deployment) -> None:
    await leave_in_numbers(deployment, SEED, 100)


@pytest.mark.soak
async def test_1000_clients_leave_at_random_moments(deployment: Deployment) -> None:
    await leave_in_numbers(deployment, SEED + 1, 1000)
