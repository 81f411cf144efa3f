"""`--kv-dtype int8` in a deployment: quantised blocks are handed over, and the text is that of one engine by itself.

In bfloat16, where the products are our own: then every key and value is the same to the bit wherever and in whatever
company it is computed. With other products a last bit may differ, and a rounding to int8 with it, so there only what
is counted is compared. The pool of 5 MiB holds 27 blocks of the 56 that all of them need, so some are
preempted and computed again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.messages.model import ModelDescription
from runner.device import Device
from runner.kernels.cpu.backend import load
from runner.kernels.errors import BackendUnavailable
from runner.model_runner import ModelRunner
from tests.deployment.exactness import MODEL, Reference, ask_all_exactly, client, named
from tests.deployment.harness import Deployment
from tests.runner.harness import Harness

BLOCK_SIZE, BLOCK_BYTES, NUM_TOKENS = 16, 190_080, 48
ASKED = ("chat-0", "chat-1", "chat-2", "chat-3", "chat-4", "prose-48", "prose-100", "random-7", "prose-129")


@pytest.fixture(scope="module")
def expected(default_model: ModelDescription) -> list[Reference]:
    """By one runner, prompts in chunks of 50 tokens, two at a time."""
    runner = ModelRunner(
        default_model, device="cpu", dtype="bfloat16", kv_dtype="int8", num_blocks=64, block_size=BLOCK_SIZE, threads=1
    )
    asked = named(*ASKED)
    prompts = [reference.prompt_token_ids for reference in asked]
    outputs = Harness(runner, 64, BLOCK_SIZE).run(prompts, NUM_TOKENS, chunk=50, concurrency=2)
    return [
        Reference(reference.name, reference.prompt_token_ids, output)
        for reference, output in zip(asked, outputs, strict=True)
    ]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment("--kv-dtype=int8", "--transport=tcp", "--kv-memory=5MiB", "--max-model-len=512") as running:
        yield running
        running.wait_quiet()


def is_exact() -> bool:
    try:
        return load(Device("cpu", "bfloat16", 1)).has_own_products
    except BackendUnavailable:
        return False


async def ask(url: str, asked: list[Reference]) -> None:
    if is_exact():
        await ask_all_exactly(url, asked, NUM_TOKENS)
        return
    async with client(url) as api:
        for reference in asked:
            answer = await api.completions.create(
                model=MODEL, prompt=reference.prompt_token_ids, max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == NUM_TOKENS


async def test_handed_over(deployment: Deployment, expected: list[Reference]) -> None:
    def metric(name: str, **labels: str) -> float:
        return deployment.metric("decode-0", name, **labels)

    assert {report["usable"] for report in deployment.blocks().values()} == {(5 << 20) // BLOCK_BYTES}
    await ask(deployment.url, expected)
    assert metric("kvyard_kv_loads_total", outcome="landed") == len(expected)
    assert metric("kvyard_preemptions_total") > 0
    hits = metric("kvyard_prefix_cache_hit_tokens_total")
    await ask(deployment.url, expected[-1:])
    await ask(deployment.url, expected[-1:])
    assert metric("kvyard_prefix_cache_hit_tokens_total") > hits
    assert metric("kvyard_kv_loads_total", outcome="recomputed") == 0
