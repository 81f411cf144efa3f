"""The process of `test_landed_blocks.py`: a prefill worker without an engine, ModelRunner and KVEndpoint over its pool.

On stdin a line `prefill NAME`, for a reference prompt: it computes the prompt whole and one token. On stdout a line
`computed NAME DIGEST TICKET TICKET`: BLAKE2b over the bytes of its blocks in order, and two leases of them.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import time

import anyio
import anyio.to_thread
import uvloop

from actors.configuration import Transport
from actors.messages.transfer import GrantLease, LeaseGranted, TransferReport
from connectors.endpoint import KVEndpoint
from connectors.memory import KVMemory
from connectors.ticket import seal
from runner.model_runner import ModelRunner
from runner.store.store import resolve
from tests.deployment.exactness import MODEL, named
from tests.runner.harness import Harness, int32

SECRET = b"a secret for tests"
NUM_BLOCKS, BLOCK_SIZE = 256, 16


def digest_of(memory: KVMemory, block_ids: list[int]) -> str:
    digest = hashlib.blake2b()
    for block_id in block_ids:
        digest.update(memory.block(block_id))
    return digest.hexdigest()


class PrefillWorker:
    def __init__(self, transport: Transport) -> None:
        description = resolve(MODEL)
        runner = ModelRunner(
            description, device="cpu", dtype="bfloat16", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, threads=1
        )
        self._harness, pool = Harness(runner, NUM_BLOCKS, BLOCK_SIZE), runner.kv_pool
        self.memory = KVMemory(pool.address, NUM_BLOCKS, pool.block_bytes, pool.memory())
        self._tickets: list[str] = []
        self.endpoint = KVEndpoint(
            memory=self.memory,
            layout=description.kv_layout("bfloat16", BLOCK_SIZE),
            engine_id="prefill-0",
            epoch=1,
            host="127.0.0.1",
            port=0,
            transport=transport,
            lease_s=120.0,
            renewal_s=5.0,
            clock=time.monotonic,
            token_bytes=secrets.token_bytes,
            report=self._report,
        )

    def _report(self, report: TransferReport) -> None:
        if isinstance(report, LeaseGranted):
            self._tickets.append(seal(report.ticket, SECRET))

    async def prefill(self, name: str) -> None:
        (reference,) = named(name)
        request = self._harness.add(name, reference.prompt_token_ids)
        num_tokens = len(request.tokens)
        await anyio.to_thread.run_sync(self._harness.step, [(request, num_tokens)])
        self._tickets.clear()
        for generation in (1, 2):
            self.endpoint.handle(GrantLease(name, generation, int32(request.blocks), num_tokens, b"digest"))
        print("computed", name, digest_of(self.memory, request.blocks), *self._tickets, flush=True)


async def main(transport: Transport) -> None:
    worker = PrefillWorker(transport)
    async with anyio.create_task_group() as tasks:
        await worker.endpoint.start(tasks)
        print("ready", worker.endpoint.transport_name, flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            await worker.prefill(line.split()[1])
        await worker.endpoint.stop()
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    uvloop.run(main("nixl" if sys.argv[1] == "nixl" else "tcp"))
