"""The process of `harness.PeerProcess`: a prefill endpoint that takes commands on stdin and tells reports on stdout."""

from __future__ import annotations

import json
import secrets
import sys
import time
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import uvloop

from actors.messages.lease import KVLayout
from actors.messages.transfer import LeaseGranted, TransferReport
from connectors.endpoint import KVEndpoint
from connectors.memory import KVMemory
from connectors.ticket import seal
from tests.connectors.harness import LAYOUT, SECRET, grant_order, pattern


def tell(*words: object) -> None:
    print(*words, flush=True)


def report(what: TransferReport) -> None:
    if isinstance(what, LeaseGranted):
        tell("granted", seal(what.ticket, SECRET))
    else:
        tell(type(what).__name__, getattr(what, "request_id", "-"))


async def main(settings: dict[str, Any]) -> None:
    sys.setswitchinterval(0.0005)
    layout = msgspec.convert(settings["layout"], KVLayout) if settings.get("layout") else LAYOUT
    pool = pattern(settings["seed"], settings["num_blocks"], layout.block_bytes)
    endpoint = KVEndpoint(
        memory=KVMemory.of_array(pool, layout.block_bytes),
        layout=layout,
        engine_id="prefill-0",
        epoch=settings["epoch"],
        host="127.0.0.1",
        port=settings["port"],
        transport=settings["transport"],
        lease_s=settings["lease_s"],
        renewal_s=5.0,
        clock=time.monotonic,
        token_bytes=secrets.token_bytes,
        report=report,
        fault=settings.get("fault"),
    )
    async with anyio.create_task_group() as tasks:
        await endpoint.start(tasks)
        tell("ready", endpoint.control_port, endpoint.transport_name)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            match line.split():
                case ["grant", request_id, block_ids]:
                    endpoint.handle(grant_order(request_id, [int(part) for part in block_ids.split(",")]))
                case ["scribble"]:
                    np.invert(pool, out=pool)
                    tell("scribbled")
                case ["stop"]:
                    break
        await endpoint.stop()
        endpoint.check()
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
