"""In float32, aggregated == prefill/decode == HF transformers, token for token, whatever the engine goes through.

Pairwise over arrangement, pool, prompts and concurrency:

    aggregated   a small pool, it preempts   all 20 prompts
    nixl         an ample pool               all 20 prompts    tickets that expired, tickets used before
    tcp          a small pool, it preempts   up to 333 tokens  tickets that expired, tickets used before

each with everything at once from a cold start, then one by one with prefix hits, then sampling with a seed. The whole
product is `soak` (test_exactness_soak.py); loads that fail by injected faults are in test_failed_loads.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import openai
import pytest

from actors.messages.model import ModelDescription
from actors.messages.request import SamplingParams
from runner.model_runner import ModelRunner
from tests.deployment.exactness import (
    SAMPLED,
    Reference,
    ask_all_exactly,
    ask_exactly,
    client,
    continued,
    named,
    num_cached,
    references,
    up_to,
)
from tests.deployment.harness import Deployment, wait_for
from tests.runner.harness import Harness

BLOCK_SIZE = 16
LEASE_S = 5.0


class Arrangement(msgspec.Struct, frozen=True):
    flags: tuple[str, ...]
    prompts: list[Reference]
    engine_id: str  # of the engine that decodes
    preempts: bool

    @property
    def has_prefill(self) -> bool:
        return self.engine_id == "decode-0"


# A block of float32 has 720 KiB. 80 MiB hold 1,808 tokens: the longest prompt with its answer (1,564), but not 20 of
# them. 64 MiB hold 1,440 tokens: the 17 prompts up to 333 tokens and their answers have about 2,500.
LEASES = (f"--lease={LEASE_S}", "--lease-renewal=0.5")
ARRANGEMENTS = {
    "aggregated": Arrangement(("--prefill=0", "--kv-memory=80MiB"), list(references()), "both-0", preempts=True),
    "nixl": Arrangement(("--transport=nixl", *LEASES), list(references()), "decode-0", preempts=False),
    "tcp": Arrangement(("--transport=tcp", "--kv-memory=64MiB", *LEASES), up_to(333), "decode-0", preempts=True),
}


@pytest.fixture(scope="module", params=list(ARRANGEMENTS))
def arrangement(request: pytest.FixtureRequest) -> Arrangement:
    return ARRANGEMENTS[request.param]


@pytest.fixture(scope="module")
def deployment(arrangement: Arrangement) -> Iterator[Deployment]:
    with Deployment("--dtype=float32", "--max-model-len=2048", *arrangement.flags) as running:
        yield running
        running.wait_quiet()


@pytest.fixture(scope="module")
def drawn(default_model: ModelDescription) -> list[Reference]:
    """What one runner by itself draws with the seed, prompts in chunks of 50 tokens."""
    runner = ModelRunner(default_model, device="cpu", dtype="float32", num_blocks=64, block_size=BLOCK_SIZE, threads=0)
    sampling = SamplingParams(temperature=SAMPLED["temperature"], top_p=SAMPLED["top_p"], seed=SAMPLED["seed"])
    asked = named("chat-1", "prose-129", "random-7")
    prompts = [reference.prompt_token_ids for reference in asked]
    outputs = Harness(runner, 64, BLOCK_SIZE).run(prompts, 32, chunk=50, sampling=[sampling] * 3)
    assert all(
        output != reference.output_token_ids[:32] for output, reference in zip(outputs, asked, strict=True)
    )  # it is no greedy choice
    return [
        Reference(reference.name, reference.prompt_token_ids, output)
        for reference, output in zip(asked, outputs, strict=True)
    ]


def loads(deployment: Deployment, outcome: str) -> float:
    return deployment.metric("decode-0", "kvyard_kv_loads_total", outcome=outcome)


async def test_all_at_once(deployment: Deployment, arrangement: Arrangement) -> None:
    await ask_all_exactly(deployment.url, arrangement.prompts)
    preemptions = deployment.metric(arrangement.engine_id, "kvyard_preemptions_total")
    assert (preemptions > 0) == arrangement.preempts
    if arrangement.has_prefill:
        assert loads(deployment, "landed") == len(arrangement.prompts)
        assert loads(deployment, "recomputed") == 0
    deployment.wait_quiet()


async def test_prefix_hits(deployment: Deployment, arrangement: Arrangement) -> None:
    """Sent again, and with a part of the answer behind it: hits on that part prove that its ids were the reference's.

    Chat answers have special tokens in them, which have no text.
    """
    url = deployment.engine(arrangement.engine_id)["url"]
    async with client(deployment.url) as through_router, client(url) as alone:
        for reference in named("chat-1", "prose-129", "prose-300"):
            again = continued(reference, 0)
            hits = deployment.metric(arrangement.engine_id, "kvyard_prefix_cache_hit_tokens_total")
            await ask_exactly(through_router, again)
            await ask_exactly(through_router, again, 4)
            full = (len(again.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
            now = deployment.metric(arrangement.engine_id, "kvyard_prefix_cache_hit_tokens_total")
            assert now - hits >= full, reference.name
            # Past the router, so that a decode engine has nothing but its own cache.
            longer = continued(reference, 60)
            usage = await ask_exactly(alone, longer)
            assert num_cached(usage) == (len(longer.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE, reference.name
            await ask_exactly(through_router, longer)


async def test_sampling_with_a_seed(deployment: Deployment, drawn: list[Reference]) -> None:
    async with client(deployment.url) as api:
        for reference in drawn:
            await ask_exactly(api, reference, sampling=SAMPLED)


async def ticket_for(api: openai.AsyncOpenAI, reference: Reference) -> dict[str, str]:
    """The first half of the hand-over, as the router asks for it."""
    answer = await api.completions.create(
        model="smollm2-135m-instruct",
        prompt=reference.prompt_token_ids,
        extra_body={"kv_transfer_params": {"do_remote_decode": True}},
    )
    params: dict[str, str] = answer.to_dict()["kv_transfer_params"]  # type: ignore[assignment]
    return params


def reason_of_failure(deployment: Deployment, request_id: str) -> str | None:
    details = [part["detail"] for part in deployment.intervals(request_id, "decode-0")]
    failed = [detail.removeprefix("load failed: ").split(";")[0] for detail in details if "load failed" in detail]
    return failed[0] if failed else None


async def test_a_ticket_that_has_expired_or_was_used(deployment: Deployment, arrangement: Arrangement) -> None:
    if not arrangement.has_prefill:
        assert [engine["role"] for engine in deployment.engines()] == ["both"]  # nobody makes tickets here
        return
    (late,) = [continued(reference, 10) for reference in named("random-333")]
    (used,) = [continued(reference, 10) for reference in named("prose-256")]
    recomputed, landed = loads(deployment, "recomputed"), loads(deployment, "landed")
    expired = deployment.metric("prefill-0", "kvyard_leases_expired_total")
    prefill, decode = (deployment.engine(engine_id)["url"] for engine_id in ("prefill-0", "decode-0"))
    async with client(prefill) as first, client(decode) as second:
        late_ticket = await ticket_for(first, late)
        used_ticket = await ticket_for(first, used)
        await ask_exactly(second, used, 16, request_id="fresh", kv_transfer_params=used_ticket)
        assert reason_of_failure(deployment, "fresh") is None
        await ask_exactly(second, used, 16, request_id="used", kv_transfer_params=used_ticket)
        assert reason_of_failure(deployment, "used") == "unknown"
        wait_for(
            "the lease expires",
            lambda: deployment.metric("prefill-0", "kvyard_leases_expired_total") == expired + 1,
            LEASE_S + 10,
        )
        await ask_exactly(second, late, 32, request_id="late", kv_transfer_params=late_ticket)
        assert reason_of_failure(deployment, "late") == "expired"
    assert loads(deployment, "landed") == landed + 1
    assert loads(deployment, "recomputed") == recomputed + 2
