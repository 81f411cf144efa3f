"""What an endpoint comes to when it may choose, when it may not, and when its settings cannot work."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from actors.messages.errors import ConfigurationError
from connectors.memory import KVMemory, runs
from connectors.transports import nixl
from connectors.transports.choose import available
from tests.connectors.harness import LAYOUT, Side, pattern, reader, running
from tools.bench.transfer import measure


async def test_auto_takes_nixl_where_it_works_and_tcp_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader(transport="auto") as side:
        assert side.endpoint.transport_name == available()[0]

    def refuse(_: str) -> None:
        raise RuntimeError("no UCX here")

    monkeypatch.setattr(nixl, "make_agent", refuse)
    async with reader(transport="auto") as side:
        assert side.endpoint.transport_name == "tcp"
    side = Side(pattern(1, 1, LAYOUT.block_bytes), LAYOUT, transport="nixl")
    with pytest.raises(ExceptionGroup) as raised:
        async with running(side):
            raise AssertionError("it started")
    assert isinstance(raised.value.exceptions[0], ConfigurationError)
    assert "no UCX here" in str(raised.value.exceptions[0])


async def test_a_port_that_is_taken_is_a_configuration_error() -> None:
    async with reader() as side:
        other = Side(pattern(1, 1, LAYOUT.block_bytes), LAYOUT, port=side.endpoint.control_port)
        with pytest.raises(ExceptionGroup) as raised:
            async with running(other):
                raise AssertionError("it started")
        assert str(side.endpoint.control_port) in str(raised.value.exceptions[0])


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--kv-host '0\.0\.0\.0'"):
        Side(pattern(1, 1, LAYOUT.block_bytes), LAYOUT, host="0.0.0.0")
    other = msgspec.structs.replace(LAYOUT, num_layers=5)
    pool = KVMemory.of_array(pattern(1, 1, LAYOUT.block_bytes), LAYOUT.block_bytes)
    assert pool.block_bytes == 32768  # 2 heads × 4 layers × 2 × 16 tokens × 64 × 2 bytes
    with pytest.raises(ValueError, match="contiguous and a multiple of 40960 bytes"):
        KVMemory.of_array(pattern(1, 1, LAYOUT.block_bytes), other.block_bytes)
    with pytest.raises(ValueError, match="contiguous"):
        KVMemory.of_array(pattern(1, 4, LAYOUT.block_bytes)[::2], LAYOUT.block_bytes)


def test_runs_end_where_any_column_jumps() -> None:
    column = np.array([4, 5, 6, 9, 10, 3], dtype=np.int32)
    other = np.array([1, 2, 8, 9, 10, 11], dtype=np.int32)
    assert runs(column) == [(0, 3), (3, 2), (5, 1)]
    assert runs(column, other) == [(0, 2), (2, 1), (3, 2), (5, 1)]
    assert runs(column[:1]) == [(0, 1)]
    assert runs(column[:0]) == []


def test_the_benchmark_measures_loads_and_bare_reads() -> None:
    loads, bares = measure("nixl", num_blocks=4, rounds=3, seed=1)
    assert len(loads) == len(bares) == 3
    assert min(loads) > 0
    assert min(bares) > 0
