"""Two prefill and two decode engines under a seeded schedule of kills and standstills, with clients all the while."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from tests.deployment.clients import Question, ask, expected, prompt_of
from tests.deployment.harness import Deployment, wait_for

pytestmark = pytest.mark.soak

SECONDS = 120.0
CLIENTS = 6
NAMES = ("prose-5", "prose-16", "prose-17", "prose-48", "prose-100", "prose-129", "random-64", "prose-256", "chat-3")
FLAGS = (
    "--dtype=float32",
    "--prefill=2",
    "--decode=2",
    "--fault=slow:0.5,slow_s:1,corrupt:0.1",
    "--kv-load-timeout=4",
    "--lease=6",
    "--lease-renewal=2",
)


def clients(deployment: Deployment, seed: int, over: Event, seen: Counter[str], wrong: list[BaseException]) -> None:
    chance = random.Random(seed)
    while not over.is_set():
        name, num_tokens = chance.choice(NAMES), chance.choice((1, 8, 32, 64))
        timeout = chance.choice((3.0, 10.0, 30.0))
        question = Question(prompt_of(name), num_tokens, stream=chance.random() < 0.5, timeout=timeout)
        try:
            answer = ask(deployment.url, question)
            text = expected(name, num_tokens)
            if answer.error is None:
                answer.must_be(text)
                seen["answered"] += 1
            else:
                code = answer.error["code"]
                assert code in ("engine_unavailable", "deadline_exceeded"), answer
                answer.must_be_an_error(code, text)
                seen[code] += 1
        except BaseException as error:
            wrong.append(error)


@contextmanager
def running_clients(deployment: Deployment, seen: Counter[str], wrong: list[BaseException]) -> Iterator[None]:
    over = Event()
    threads = [Thread(target=clients, args=(deployment, seed, over, seen, wrong)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60.0)


def trouble(deployment: Deployment, chance: random.Random) -> str:
    """One fault at one engine that is well, and for a standstill its end."""
    engine = chance.choice([engine for engine in deployment.engines() if engine["healthy"]])
    whole = chance.random() < 0.5
    if chance.random() < 0.5:
        deployment.signal(engine["engine_id"], signal.SIGKILL, engine=whole, worker=not whole)

        def noticed() -> bool:
            now = deployment.engine(engine["engine_id"])
            return not now["healthy"] or bool(now["epoch"] > engine["epoch"])

        wait_for("the router knows", noticed, 20.0)
        return f"{engine['engine_id']} killed"
    deployment.signal(engine["engine_id"], signal.SIGSTOP, engine=whole)
    time.sleep(chance.uniform(0.5, 7.0))  # the length of the standstill itself
    deployment.signal(engine["engine_id"], signal.SIGCONT, engine=whole)
    return f"{engine['engine_id']} stood still"


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_kills_and_standstills_at_random(transport: str) -> None:
    seen: Counter[str] = Counter()
    wrong: list[BaseException] = []
    done: list[str] = []
    chance = random.Random(transport)
    with Deployment(*FLAGS, f"--transport={transport}") as deployment:
        with running_clients(deployment, seen, wrong):
            end = time.monotonic() + SECONDS
            while time.monotonic() < end and not wrong:
                wait_for("an engine is well", lambda: any(e["healthy"] for e in deployment.engines()), 60.0)
                done.append(trouble(deployment, chance))
                # As long as at least one of each side is well there is something to lose.
                wait_for("most engines are well", lambda: sum(e["healthy"] for e in deployment.engines()) >= 3, 60.0)
        assert not wrong, (wrong, done)
        assert seen["answered"] > 20, seen
        deployment.wait_healthy(90.0)
        deployment.wait_quiet(60.0)
        print(seen, done)
    assert len(done) > 5
