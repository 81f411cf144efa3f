"""A one-sided READ from an engine that stands still cannot be taken back: its blocks wait in quarantine.

UCX over TCP alone: through shared memory a READ needs nothing of the other process and would land all the same.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.deployment.clients import Question, ask, expected, in_background, prompt_of
from tests.deployment.harness import Deployment, wait_for

LEASE_S = 4.0
FLAGS = (
    "--dtype=float32",
    "--transport=nixl",
    "--fault=slow:1,slow_s:1.5",
    "--kv-load-timeout=3",
    f"--lease={LEASE_S}",
    "--lease-renewal=2",
)
QUIET_S = LEASE_S + 20


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(*FLAGS, environment={"UCX_TLS": "tcp"}) as running:
        yield running


def quarantined(deployment: Deployment) -> int:
    return int(deployment.blocks()["decode-0"]["quarantined"])


@pytest.mark.parametrize(
    ("name", "then"),
    [("prose-129", signal.SIGCONT), pytest.param("prose-100", signal.SIGKILL, marks=pytest.mark.soak)],
)
def test_blocks_of_a_read_that_hangs_are_quarantined_until_it_ends(
    deployment: Deployment, name: str, then: signal.Signals
) -> None:
    before = deployment.engine("prefill-0")
    client = in_background(deployment.url, Question(prompt_of(name), request_id=f"hangs-{name}"))
    deployment.wait_state(f"hangs-{name}", "decode-0", "waiting_for_remote_kvs", age=0.5)
    deployment.signal("prefill-0", signal.SIGSTOP)
    # The answer comes out of other blocks, while the load's own wait for bytes that may still come.
    client.result().must_be(expected(name, 16))
    num_blocks = -(-len(prompt_of(name)) // 16)
    assert quarantined(deployment) == num_blocks
    report = deployment.blocks()["decode-0"]
    assert [(grant["state"], grant["blocks"], grant["reason"]) for grant in report["grants"]] == [
        ("quarantined", num_blocks, "its failed READ may still write")
    ]
    assert deployment.engine("decode-0")["healthy"]
    deployment.signal("prefill-0", then)
    wait_for("the quarantine ends with its READ", lambda: quarantined(deployment) == 0, 20.0)
    if then is signal.SIGKILL:
        deployment.wait_restarted(before)
    deployment.wait_healthy()
    deployment.wait_quiet(QUIET_S)
    ask(deployment.url, Question(prompt_of(name))).must_be(expected(name, 16))
