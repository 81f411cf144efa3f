"""After every kind of failed load the text is still, token for token, that of HF transformers in float32.

Each deployment suffers all faults at once, seeded, with everything at once: wrong bits, lost, late, doubled and
reordered control messages, links that break, READs that nobody can stop. Rounds go on until each reason for which a
load can fail by them has been seen in a request's story. Expired leases and tickets used twice are in
test_exactness.py; engines that die or stand still in test_transfer_faults.py. One kind at a time is `soak`.
"""

from __future__ import annotations

import pytest

from tests.deployment.exactness import ask_all_exactly, references, up_to
from tests.deployment.harness import Deployment
from tests.deployment.modes import DEPTH_3, EVERY_MODE, PRIORITY, SMALL, SMALL_POOL

LOAD_TIMEOUT_S = 2.0
MAX_ROUNDS = 8
FAULTS = (
    # Of a load's two control messages one in twelve is lost, and before one in twenty the link breaks for all; a
    # stalled READ outlives the load's deadline, and its blocks go into quarantine.
    "corrupt:0.4,drop:0.04,delay:0.3,delay_s:0.1,duplicate:0.3,reorder:0.3,death:0.05,stall:0.2,stall_s:3,seed:11"
)
REASONS = {"checksum", "deadline", "peer_lost"}


@pytest.mark.parametrize(
    ("flags", "num_tokens"),
    [
        pytest.param(("--transport=nixl", "--no-prefix-caching", *PRIORITY), 16, id="nixl-priority"),
        # The 13 prompts have 1,319 tokens with their answers.
        pytest.param(("--transport=tcp", *SMALL, *DEPTH_3), 40, id="tcp-small-pool-depth-3"),
        *(pytest.param(mode, 64, id=" ".join(mode), marks=pytest.mark.soak) for mode in EVERY_MODE),
    ],
)
async def test_all_faults_at_once(flags: tuple[str, ...], num_tokens: int) -> None:
    with Deployment("--dtype=float32", f"--kv-load-timeout={LOAD_TIMEOUT_S}", f"--fault={FAULTS}", *flags) as running:
        await until_all_reasons(running, num_tokens, priorities=3 if "--policy=priority" in flags else 1)
        assert running.metric("decode-0", "kvyard_kv_loads_total", outcome="recomputed") >= len(REASONS)
        assert running.metric("decode-0", "kvyard_kv_loads_total", outcome="landed") > 0
        assert running.metric("decode-0", "kvyard_kv_loads_total", outcome="failed") == 0
        if SMALL_POOL in flags:
            assert running.metric("decode-0", "kvyard_preemptions_total") > 0
        running.wait_quiet()
        running.wait_healthy()


async def until_all_reasons(deployment: Deployment, num_tokens: int, priorities: int) -> None:
    asked, seen = up_to(129), set[str]()
    for number in range(MAX_ROUNDS):
        # More rounds are only for more loads.
        count = 4 if number else num_tokens
        await ask_all_exactly(deployment.url, asked, count, id_prefix=f"{number}-", priorities=priorities)
        for reference in asked:
            for part in deployment.intervals(f"{number}-{reference.name}", "decode-0"):
                if "load failed: " in part["detail"]:
                    seen.add(part["detail"].split("load failed: ")[1].split(";")[0])
        if seen >= REASONS:
            break
    assert seen == REASONS


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["nixl", "tcp"])
@pytest.mark.parametrize("pool", ["1GiB", "80MiB"])
@pytest.mark.parametrize(
    ("fault", "fails"),
    [
        ("corrupt:0.5", True),
        ("drop:0.2", True),
        ("death:0.3", True),
        ("stall:0.5,stall_s:3", True),
        ("delay:1,delay_s:0.5", False),
        ("duplicate:1", False),
        ("reorder:1", False),
    ],
)
async def test_one_kind_of_fault(transport: str, pool: str, fault: str, fails: bool) -> None:
    with Deployment(
        "--dtype=float32",
        "--max-model-len=2048",
        f"--transport={transport}",
        f"--kv-memory={pool}",
        "--kv-load-timeout=2.5",
        f"--fault={fault},seed:3",
    ) as running:
        await ask_all_exactly(running.url, references())
        await ask_all_exactly(running.url, references())  # what a bad load left in the prefix cache would show
        recomputed = running.metric("decode-0", "kvyard_kv_loads_total", outcome="recomputed")
        assert (recomputed > 0) == fails
        running.wait_quiet()
