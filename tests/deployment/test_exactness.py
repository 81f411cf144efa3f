"""In float32, aggregated == prefill/decode == HF transformers, token for token, whatever the engine goes through.

Pairwise over arrangement, pool, steps in flight and policy (three priorities in turn); small pools preempt:

    aggregated   small   depth 3   fcfs       all 20 prompts
    nixl         ample   depth 2   fcfs       all 20 prompts    tickets that expired, tickets used before
    tcp          small   depth 2   fcfs       up to 129 tokens  tickets that expired, tickets used before

each with everything at once from a cold start, then with prefix hits, then sampling with a seed; and from a cold start

    aggregated   ample   depth 2   priority   up to 129 tokens
    nixl         small   depth 3   priority   up to 129 tokens
    tcp          ample   depth 3   priority   up to 129 tokens
    aggregated   small   depth 1   fcfs       up to 129 tokens

The whole product is `soak` (test_exactness_soak.py); loads that fail by injected faults are in test_failed_loads.py.
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
LEASE_S = 4.0


class Arrangement(msgspec.Struct, frozen=True):
    flags: tuple[str, ...]
    prompts: list[Reference]
    engine_id: str  # of the engine that decodes
    preempts: bool

    @property
    def has_prefill(self) -> bool:
        return self.engine_id == "decode-0"


# A block of float32 has 720 KiB. 128 MiB hold 2,912 tokens: the 20 prompts with their answers have 6,452. 40 MiB hold
# 896 tokens: the 13 prompts up to 129 tokens have 1,319.
LEASES = (f"--lease={LEASE_S}", "--lease-renewal=0.5")
ARRANGEMENTS = {
    "aggregated": Arrangement(
        ("--prefill=0", "--kv-memory=128MiB", "--async-depth=3"), list(references()), "both-0", preempts=True
    ),
    "nixl": Arrangement(("--transport=nixl", *LEASES), list(references()), "decode-0", preempts=False),
    "tcp": Arrangement(("--transport=tcp", "--kv-memory=40MiB", *LEASES), up_to(129), "decode-0", preempts=True),
}

SMALL = "--kv-memory=40MiB"
FROM_COLD = {
    "aggregated-priority": Arrangement(("--prefill=0", "--policy=priority"), up_to(129), "both-0", preempts=False),
    "nixl-small-depth-3-priority": Arrangement(
        ("--transport=nixl", SMALL, "--async-depth=3", "--policy=priority"), up_to(129), "decode-0", preempts=True
    ),
    "tcp-depth-3-priority": Arrangement(
        ("--transport=tcp", "--async-depth=3", "--policy=priority"), up_to(129), "decode-0", preempts=False
    ),
    "aggregated-small-depth-1": Arrangement(
        ("--prefill=0", SMALL, "--async-depth=1"), up_to(129), "both-0", preempts=True
    ),
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
    runner = ModelRunner(default_model, device="cpu", dtype="float32", num_blocks=64, block_size=BLOCK_SIZE, threads=1)
    sampling = SamplingParams(temperature=SAMPLED["temperature"], top_p=SAMPLED["top_p"], seed=SAMPLED["seed"])
    asked = named("chat-1", "prose-129", "random-7")
    prompts = [reference.prompt_token_ids for reference in asked]
    outputs = Harness(runner, 64, BLOCK_SIZE).run(prompts, 24, chunk=50, sampling=[sampling] * 3)
    assert all(
        output != reference.output_token_ids[:24] for output, reference in zip(outputs, asked, strict=True)
    )  # it is no greedy choice
    return [
        Reference(reference.name, reference.prompt_token_ids, output)
        for reference, output in zip(asked, outputs, strict=True)
    ]


def loads(deployment: Deployment, outcome: str) -> float:
    return deployment.metric("decode-0", "kvyard_kv_loads_total", outcome=outcome)


@pytest.mark.parametrize("name", list(FROM_COLD))
async def test_from_cold(name: str) -> None:
    arrangement = FROM_COLD[name]
    with Deployment("--dtype=float32", "--max-model-len=2048", *arrangement.flags) as running:
        await all_at_once(running, arrangement)


async def test_all_at_once(deployment: Deployment, arrangement: Arrangement) -> None:
    await all_at_once(deployment, arrangement)


async def all_at_once(deployment: Deployment, arrangement: Arrangement) -> None:
    priorities = 3 if "--policy=priority" in arrangement.flags else 1
    await ask_all_exactly(deployment.url, arrangement.prompts, priorities=priorities)
    preemptions = deployment.metric(arrangement.engine_id, "kvyard_preemptions_total")
    assert (preemptions > 0) == arrangement.preempts
    if arrangement.has_prefill:
        assert loads(deployment, "landed") == len(arrangement.prompts)
        assert loads(deployment, "recomputed") == 0
    deployment.wait_quiet()


async def test_prefix_hits(deployment: Deployment, arrangement: Arrangement) -> None:
    """Sent again, then with a part of the answer behind it: hits on that part prove that its ids were the reference's.

    The answer of chat-0 has special tokens at 7, 9 and 10, which have no text; its first 16 are shown so.
    """
    again = named("chat-0", "prose-48", "prose-129")
    await ask_all_exactly(deployment.url, again, 20)
    hits = deployment.metric(arrangement.engine_id, "kvyard_prefix_cache_hit_tokens_total")
    await ask_all_exactly(deployment.url, again, 20)
    expected = sum(full_blocks(reference) for reference in again)  # 0 + 32 + 128
    assert deployment.metric(arrangement.engine_id, "kvyard_prefix_cache_hit_tokens_total") == hits + expected

    # Past the router, so that a decode engine has nothing but its own cache.
    longer = [continued(reference, 18) for reference in again]
    async with client(deployment.engine(arrangement.engine_id)["url"]) as api:
        for reference in longer:
            usage = await ask_exactly(api, reference, 2)
            assert num_cached(usage) == full_blocks(reference), reference.name
    await ask_all_exactly(deployment.url, longer, 4)


def full_blocks(reference: Reference) -> int:
    """Tokens of the prompt in full blocks, short of its last token, which is always computed."""
    return (len(reference.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


async def test_sampling_with_a_seed(deployment: Deployment, drawn: list[Reference]) -> None:
    await ask_all_exactly(deployment.url, drawn, sampling=SAMPLED)


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
