"""Prompts through a ModelRunner without any actor: a small planner with a fixed chunk size and a block allocator."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from actors.messages.plan import NewRequest, StepPlan
from actors.messages.request import SamplingParams
from runner.model_runner import ModelRunner


def int32(values: Sequence[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


class Running(msgspec.Struct):
    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    num_computed: int = 0
    blocks: list[int] = msgspec.field(default_factory=list)
    known: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class Harness:
    """Drives one runner. Blocks are handed out in a shuffled order, so that no table is a run of ids."""

    def __init__(self, runner: ModelRunner, num_blocks: int, block_size: int) -> None:
        self.runner, self._block_size = runner, block_size
        self._free = list(range(1, num_blocks))
        random.Random(7).shuffle(self._free)
        self._step = 0
        self._dropped: list[str] = []

    def add(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams = SamplingParams()) -> Running:  # noqa: B008
        return Running(request_id, list(prompt), len(prompt), sampling)

    def take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def step(self, scheduled: Sequence[tuple[Running, int]]) -> None:
        """Computes so many further tokens of each request; a request that catches up gets its next token."""
        new, num_new_blocks, new_blocks, sampled = [], [], [], []
        for request, count in scheduled:
            end = request.num_computed + count
            wanted = -(-end // self._block_size) - len(request.blocks)
            taken = self.take(max(0, wanted))
            request.blocks += taken
            if not request.known:
                tokens = int32(request.tokens)
                new.append(NewRequest(request.request_id, tokens, request.num_prompt_tokens, request.sampling))
                taken, request.known = request.blocks, True
            num_new_blocks.append(len(taken))
            new_blocks += taken
            sampled.append(int(end == len(request.tokens)))
        plan = StepPlan(
            step=self._step,
            request_ids=tuple(request.request_id for request, _ in scheduled),
            num_scheduled_tokens=int32([count for _, count in scheduled]),
            num_computed_tokens=int32([request.num_computed for request, _ in scheduled]),
            num_sampled=int32(sampled),
            num_new_blocks=int32(num_new_blocks),
            new_block_ids=int32(new_blocks),
            new_requests=tuple(new),
            dropped_request_ids=tuple(self._dropped),
        )
        self._step += 1
        self._dropped = []
        result = self.runner.launch(plan).result()
        assert result.step == plan.step
        assert result.num_sampled == plan.num_sampled
        token_ids = iter(np.frombuffer(result.sampled_token_ids, np.int32).tolist())
        for (request, count), draws in zip(scheduled, sampled, strict=True):
            request.num_computed += count
            request.tokens += [next(token_ids) for _ in range(draws)]

    def preempt(self, request: Running) -> None:
        """Frees its blocks; it is computed again from its first token."""
        self._free[:0] = request.blocks
        self._dropped.append(request.request_id)
        request.blocks, request.num_computed, request.known = [], 0, False

    def finish(self, request: Running) -> None:
        self.preempt(request)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        chunk: int = 1 << 30,
        concurrency: int = 1 << 30,
        sampling: Sequence[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """`num_tokens` outputs of each prompt; `concurrency` prompts at a time, `chunk` tokens of each a step."""
        waiting = [
            self.add(f"request-{index}", prompt, sampling[index] if sampling else SamplingParams())
            for index, prompt in enumerate(prompts)
        ]
        everyone, running = list(waiting), list[Running]()
        while waiting or running:
            while waiting and len(running) < concurrency:
                running.append(waiting.pop(0))
            self.step([(request, min(chunk, len(request.tokens) - request.num_computed)) for request in running])
            for request in [request for request in running if len(request.output) >= num_tokens]:
                running.remove(request)
                self.finish(request)
        return [request.output for request in everyone]
