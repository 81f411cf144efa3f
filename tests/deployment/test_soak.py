"""After hundreds of requests through the same blocks the text is still that of an engine that does everything itself.

`gibberish after about 100 requests, and no check noticed` is the report behind it (sglang#23020). A small pool makes
every block change hands many times.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.deployment.clients import Answer, Question, ask, tokenizer
from tests.deployment.harness import Deployment
from tests.references.make_references import SENTENCES

pytestmark = pytest.mark.soak

REQUESTS = 500
AT_ONCE = 16
MAX_TOKENS = 8
# 128 MiB are 182 blocks in float32: 2,912 tokens, of which 16 requests use about two thirds.
FLAGS = ("--dtype=float32", "--kv-memory=128MiB", "--max-model-len=1024")


def questions() -> list[Question]:
    """Prompts of prose, of 5 to 300 tokens; one in four repeats the beginning of an earlier one."""
    chance, made = random.Random(500), list[Question]()
    for number in range(REQUESTS):
        tokens = tokenizer().encode(" ".join(chance.choices(SENTENCES, k=24))).ids
        if number % 4 == 3:
            tokens = chance.choice(made).prompt + tokens
        prompt = tokens[: round(5 * 60 ** chance.random())]
        made.append(Question(prompt, MAX_TOKENS, stream=chance.random() < 0.5, timeout=300.0))
    return made


def answers(deployment: Deployment, asked: list[Question]) -> list[Answer]:
    with ThreadPoolExecutor(AT_ONCE) as clients:
        return list(clients.map(lambda question: ask(deployment.url, question), asked))


@pytest.fixture(scope="module")
def aggregated_texts() -> list[str]:
    with Deployment(*FLAGS, "--prefill=0") as deployment:
        found = answers(deployment, questions())
        deployment.wait_quiet()
    for answer in found:
        answer.must_be(answer.text)
    return [answer.text for answer in found]


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_500_requests_have_the_text_of_the_aggregated_engine(aggregated_texts: list[str], transport: str) -> None:
    with Deployment(*FLAGS, f"--transport={transport}") as deployment:
        for answer, text in zip(answers(deployment, questions()), aggregated_texts, strict=True):
            answer.must_be(text)
        landed, recomputed = (
            deployment.metric("decode-0", "kvyard_kv_loads_total", outcome=outcome)
            for outcome in ("landed", "recomputed")
        )
        assert landed > REQUESTS / 2
        assert recomputed == 0
        deployment.wait_quiet()


@pytest.mark.parametrize("stream", [False, True])
def test_a_deployment_told_to_fail_says_so(stream: bool) -> None:
    with Deployment("--dtype=float32", "--fault=corrupt:1", "--kv-load-failure-policy=fail") as deployment:
        answer = ask(deployment.url, Question(list(range(100, 150)), stream=stream))
        assert (answer.status, answer.text) == (502, "")
        assert answer.error is not None
        assert answer.error["code"] == "kv_load_failed"
        assert deployment.metric("decode-0", "kvyard_kv_loads_total", outcome="failed") == 1
        deployment.wait_quiet()
