"""A step plan becomes a forward pass: state from the plans → batch → model → logits → sampled tokens.

Owns the device, the weights, the KV pool and what is known of each request. One thread calls it; another may wait for
the steps in progress. Several may be in progress: a step's input tokens are taken on the device, from the step before.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from actors.messages.model import ModelDescription
from actors.messages.plan import NewRequest, StepPlan
from actors.messages.request import SamplingParams
from runner.batch import Batch, BatchBuilder, Geometry
from runner.device import Device
from runner.kernels.registry import choose
from runner.kv_pool import KVPool
from runner.last_tokens import LastTokens
from runner.model.llama import LlamaModel
from runner.requests import PlannedRow, RequestTable
from runner.sampling import Draw
from runner.step_in_progress import StepInProgress
from runner.transformers_model.model import TransformersModel
from runner.weights.files import open_weights

_WARM_UP_TOKENS = 256

logger = logging.getLogger(__name__)


class ModelRunner:
    kv_pool: KVPool

    def __init__(
        self,
        description: ModelDescription,
        *,
        device: str,
        dtype: str,
        num_blocks: int,
        block_size: int,
        threads: int,
        kv_dtype: str = "auto",
        weights: str = "dense",
        random_seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Loads the weights and makes the pool of `num_blocks` blocks, the null block 0 among them.

        `threads` 0: all cores. `weights` "stored": quantised matrices of a GGUF are computed on as they are. Raises
        ConfigurationError for weights that are damaged or do not fit the description, and for a device, dtype or pool
        that this machine does not have room for.
        """
        self._device = Device(device, dtype, threads)
        self._kernels = choose(self._device)
        logger.info("the model is computed by %s", self._kernels.name)
        self._random_seed, self._clock = random_seed, clock
        self._context_length = description.context_length
        self._geometry = Geometry(description.num_heads, description.num_kv_heads, description.num_layers, block_size)
        with torch.inference_mode(), self._device.loading():
            self._model: LlamaModel | TransformersModel
            if description.modelling == "transformers":
                if weights == "stored":
                    logger.info("matrices dense: all; transformers' own code computes this model")
                self._model = TransformersModel(description, self._device)
            else:
                source = open_weights(description, self._device, weights == "stored")
                self._model = LlamaModel(description, source, self._device, self._kernels, description.context_length)
        # Not in inference mode: others may write into it, such as a transfer.
        self.kv_pool = KVPool(
            self._device,
            num_blocks=num_blocks,
            kv_heads=description.num_kv_heads,
            layers=description.num_layers,
            block_size=block_size,
            head_size=description.head_size,
            kv_dtype=kv_dtype,
        )
        self._requests = RequestTable(block_size)
        self._builder = BatchBuilder(self._geometry, self._device)
        self._last_tokens = LastTokens(self._device)
        self._launched: deque[StepInProgress] = deque()  # whose sampled tokens the requests do not know yet

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepInProgress:
        """Hands the plan's forward pass and sampling to the device, in the order of the calls, and waits for none.

        Raises ValueError for a plan that cannot be. Whatever the device itself raises may come from a later call.
        """
        while self._launched and self._launched[0].done:
            self._launched.popleft().remember()
        started = self._device.mark(self._clock)
        computation = self.compute(plan)
        if computation is None:
            return StepInProgress(plan, (), None, ())
        batch, logits = computation
        computed = self._device.mark(self._clock)
        token_ids = self._sample(batch, logits)
        self._last_tokens.keep(batch, token_ids)
        for row in batch.sampling_rows:
            row.state.sampled(row.end)
        on_host = self._device.to_host(token_ids.to(torch.int32))
        marks = (started, computed, self._device.mark(self._clock))
        step = StepInProgress(plan, batch.sampling_rows, on_host, marks)
        self._launched.append(step)
        return step

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> tuple[Batch, torch.Tensor] | None:
        """The first half of `launch`: the batch, and float32 logits [sampling rows, vocabulary]. None without rows."""
        batch = self._batch(plan)
        return None if batch is None else (batch, self._forward(batch, batch.sampling_tokens))

    @torch.inference_mode()
    def score(self, plan: StepPlan) -> torch.Tensor:
        """float32 [tokens, vocabulary]: the logits of every token of a plan of one request. Nothing is sampled."""
        batch = self._batch(plan)
        assert batch is not None
        return self._forward(batch, torch.arange(plan.num_tokens, device=self._device.torch))

    def warm_up(self) -> float:
        """One prefill with a context, decodes and a draw, in the null block: the first request then finds all ready.

        Returns the seconds that the prefill took per token.
        """
        started, seconds_per_token = self._clock(), 0.0
        tokens = min(_WARM_UP_TOKENS, self._context_length)
        state = NewRequest("", np.zeros(tokens, np.int32).tobytes(), 1, SamplingParams(temperature=1.0))
        table = RequestTable(self._geometry.block_size)
        num_blocks = -(-tokens // self._geometry.block_size)
        for computed, scheduled in ((0, tokens), (1, 2), (1, 1)):
            plan = StepPlan(
                step=0,
                request_ids=("",),
                num_scheduled_tokens=np.array([scheduled], np.int32).tobytes(),
                num_computed_tokens=np.array([computed], np.int32).tobytes(),
                num_sampled=np.array([1], np.int32).tobytes(),
                num_new_blocks=np.array([num_blocks], np.int32).tobytes(),
                new_block_ids=np.zeros(num_blocks, np.int32).tobytes(),
                new_requests=(state,),
            )
            with torch.inference_mode():
                batch = self._builder.build(table.apply(plan))
                self._sample(batch, self._forward(batch, batch.sampling_tokens))
                self.kv_pool.clear_null_block()
            seconds_per_token = seconds_per_token or (self._clock() - started) / scheduled
        return seconds_per_token

    def _batch(self, plan: StepPlan) -> Batch | None:
        rows = self._requests.apply(plan)
        if not rows:
            return None
        self._last_tokens.make_room(self._requests.num_slots)
        return self._builder.build(rows)

    def _forward(self, batch: Batch, wanted: torch.Tensor) -> torch.Tensor:
        """Logits of the packed tokens `wanted`."""
        self._last_tokens.fill_in(batch)
        return self._model.logits_of(batch, self.kv_pool, wanted)

    def _sample(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        """int64 [sampling rows], on the device."""
        if not batch.sampling_rows:
            return batch.sampling_tokens
        return self._kernels.sample(logits, [self._draw(row) for row in batch.sampling_rows])

    def _draw(self, row: PlannedRow) -> Draw:
        state, seed = row.state, row.state.sampling.seed
        own = f"{self._random_seed}/{state.request_id}" if seed is None else seed
        return Draw(state.sampling, own, row.end - state.num_prompt_tokens)
