"""Helpers of the native kernels: every chunk once, whoever does it, and nobody waits for one that does not come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runner.kernels import reference
from runner.kernels.cpu.backend import CpuKernels
from tests.runner.kernels.conftest import Case, inputs

ROOT = Path(__file__).parents[3]
ROUNDS = 300


@pytest.fixture
def threads(native: CpuKernels) -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_same(count: int, threads: None) -> None:
    """More threads than cores too: a helper then is often late."""
    torch.set_num_threads(count)
    given = inputs(Case([(700, 1), (0, 130), (90, 1)], kv_heads=3), torch.float32)
    expected = reference.paged_attention(*given.attention(1))  # type: ignore[arg-type]
    first = torch.ops.kvyard.paged_attention(*given.attention(1))
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=2e-6)
    gate_up = torch.randn(300, 3072)
    activated = torch.ops.kvyard.swiglu(gate_up)
    for _ in range(ROUNDS):
        assert torch.equal(torch.ops.kvyard.paged_attention(*given.attention(1)), first)
        assert torch.equal(torch.ops.kvyard.swiglu(gate_up), activated)


def test_two_callers_at_once(threads: None) -> None:
    """One has the helpers, the other goes on without; neither gets a chunk of the other's."""
    expected = [torch.ops.kvyard.swiglu(torch.full((300, 3072), float(index))) for index in range(2)]
    right: list[bool] = []

    def call(index: int) -> None:
        torch.set_num_threads(2)
        own = torch.full((300, 3072), float(index))
        right.extend(torch.equal(torch.ops.kvyard.swiglu(own), expected[index]) for _ in range(ROUNDS))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 2 * ROUNDS


IDLE = """
import os, time, torch
from runner.device import Device
from runner.kernels.cpu.backend import load
load(Device("cpu", "float32", 2))
torch.set_num_threads(2)
for _ in range(20):
    torch.ops.kvyard.swiglu(torch.ones(300, 3072))
tasks = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
helpers = tasks.count("kvyard-helper\\n")
before = time.process_time()
time.sleep(0.5)
print(helpers, time.process_time() - before)
"""


NO_MORE_THREADS = """
#include <errno.h>
#include <pthread.h>
int pthread_create(pthread_t* t, const pthread_attr_t* a, void* (*f)(void*), void* x) { return EAGAIN; }
"""


def test_without_a_thread_to_be_had_the_caller_does_it_all(native: CpuKernels, tmp_path: Path) -> None:
    """As in a container at its limit of processes. Signals, blocked while a helper starts, come through again."""
    source, library = tmp_path / "none.c", tmp_path / "none.so"
    source.write_text(NO_MORE_THREADS)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    code = """
import signal, torch
from runner.device import Device
from runner.kernels.cpu.backend import load
load(Device("cpu", "float32", 1))
gate_up = torch.full((300, 3072), 2.0)
torch.set_num_threads(2)
activated = torch.ops.kvyard.swiglu(gate_up)
torch.set_num_threads(1)
print(bool((activated == activated[0, 0]).all()), len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
"""
    environment = os.environ | {"LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "True 0\n"


def test_helpers_sleep_when_there_is_nothing_to_do(native: CpuKernels) -> None:
    """They look out for some 40 microseconds: of half a second nothing that shows. The process ends with them."""
    result = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, cwd=ROOT, check=True)
    helpers, seconds = result.stdout.split()
    assert int(helpers) == 1, "beside the caller, for two threads"
    assert float(seconds) < 0.05
