"""The whole product behind test_exactness.py, with all 20 prompts; and engines whose KV layouts do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from tests.deployment.exactness import ask_all_exactly, ask_exactly, client, named, references
from tests.deployment.harness import MARK, ROOT, Deployment, free_port, get_json, wait_for
from tests.deployment.test_exactness import ticket_for

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("arrangement", ["aggregated", "nixl", "tcp"])
@pytest.mark.parametrize("pool", ["1GiB", "80MiB"])  # 80 MiB: 113 blocks, the longest prompt needs 98
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_every_combination(arrangement: str, pool: str, prefix_caching: bool, depth: int, policy: str) -> None:
    together = arrangement == "aggregated"
    flags = ["--prefill=0"] if together else [f"--transport={arrangement}"]
    flags += [f"--async-depth={depth}", f"--policy={policy}"]
    priorities = 3 if policy == "priority" else 1
    if not prefix_caching:
        flags.append("--no-prefix-caching")
    with Deployment("--dtype=float32", "--max-model-len=2048", f"--kv-memory={pool}", *flags) as running:
        engine_id = "both-0" if together else "decode-0"
        await ask_all_exactly(running.url, references(), concurrency=20, priorities=priorities)
        assert (running.metric(engine_id, "kvyard_preemptions_total") > 0) == (pool == "80MiB")
        await ask_all_exactly(running.url, references(), concurrency=16, priorities=priorities)
        await ask_all_exactly(running.url, references(), concurrency=1)
        assert (running.metric(engine_id, "kvyard_prefix_cache_hit_tokens_total") > 0) == prefix_caching
        if not together:
            assert running.metric(engine_id, "kvyard_kv_loads_total", outcome="recomputed") == 0
        running.wait_quiet()


def test_engines_whose_blocks_do_not_fit() -> None:
    """A decode engine with blocks of 32 tokens gets a ticket for blocks of 16: it says so, and computes by itself."""
    with Deployment("--dtype=float32") as running:
        prefill = running.engine("prefill-0")
        argv = Path(f"/proc/{prefill['pid']}/cmdline").read_text().split("\0")
        (secret,) = [argument for argument in argv if argument.startswith("--kv-secret-file=")]
        port = free_port()
        command = [sys.executable, "-m", "tools.cli", "serve", "--role=decode", f"--port={port}", "--block-size=32"]
        command += ["--dtype=float32", "--engine-id=other", secret]
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: running.mark}) as other:
            try:
                url = f"http://127.0.0.1:{port}"
                wait_for("the other engine is ready", lambda: get_json(f"{url}/ready"), 60)
                uvloop.run(hand_over(prefill["url"], url))
                report = get_json(f"{url}/debug/engine")
                assert "block_size: ours 16, theirs 32" in report["incompatible_peers"]["prefill-0"]
            finally:
                other.terminate()
                assert other.wait(30) == 0
        running.wait_quiet()


async def hand_over(prefill_url: str, decode_url: str) -> None:
    (reference,) = named("prose-300")
    async with client(prefill_url) as first, client(decode_url) as second:
        ticket = await ticket_for(first, reference)
        await ask_exactly(second, reference, kv_transfer_params=ticket)
