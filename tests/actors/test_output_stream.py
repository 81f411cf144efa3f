from __future__ import annotations

import anyio
import pytest

from actors.messages.errors import RefusalReason, RequestRefused
from actors.messages.request import FinishReason, RequestOutput
from actors.output_stream import OutputStream


async def test_outputs_that_wait_are_merged_without_a_loss() -> None:
    stream = OutputStream("r", limit=100)
    stream.put(RequestOutput("r", token_ids=(1,), num_cached_tokens=16))
    stream.put(RequestOutput("r", token_ids=(2, 3)))
    assert await anext(stream) == RequestOutput("r", token_ids=(1, 2, 3), num_cached_tokens=16)
    stream.put(RequestOutput("r", token_ids=(4,), finish_reason=FinishReason.LENGTH))
    assert [output.token_ids async for output in stream] == [(4,)]


async def test_a_reader_that_falls_behind_is_noticed() -> None:
    stream = OutputStream("r", limit=2)
    assert stream.put(RequestOutput("r", token_ids=(1, 2)))
    assert not stream.put(RequestOutput("r", token_ids=(3,)))


async def test_tokens_before_an_error_are_read_before_it() -> None:
    stream = OutputStream("r", limit=100)
    stream.put(RequestOutput("r", token_ids=(1,)))
    stream.fail(RefusalReason.DEADLINE_EXCEEDED, "too late")
    first = await anext(stream)
    assert (first.token_ids, first.finish_reason, first.error) == ((1,), None, None)
    with pytest.raises(RequestRefused) as raised:
        await anext(stream)
    assert raised.value.reason is RefusalReason.DEADLINE_EXCEEDED
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_what_comes_after_the_finish_is_not_delivered() -> None:
    stream = OutputStream("r", limit=100)
    stream.fail(RefusalReason.SLOW_READER, "slow")
    stream.put(RequestOutput("r", token_ids=(9,), finish_reason=FinishReason.ABORT))
    with pytest.raises(RequestRefused) as raised:
        await anext(stream)
    assert raised.value.reason is RefusalReason.SLOW_READER


async def test_a_waiting_reader_wakes() -> None:
    stream = OutputStream("r", limit=100)
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            assert (await anext(stream)).token_ids == (5,)

        tasks.start_soon(read)
        await anyio.lowlevel.checkpoint()
        stream.put(RequestOutput("r", token_ids=(5,)))
