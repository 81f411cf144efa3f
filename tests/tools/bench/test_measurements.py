"""What the measurements read from programs and from the kernel. The texts are shortened real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from actors.messages.model import ModelDescription
from tools.bench import peers as peers_module
from tools.bench.memory import mappings, parameters, touched
from tools.bench.peers import FIRST_TOKEN, THROUGHPUT, Load, Loaded, Peers, compare, figures_of
from tools.bench.processes import Server
from tools.bench.rows import Measured, Row
from tools.bench.step_ratio import Times
from tools.bench.tables import command, machine, measured
from tools.bench.waiting import Sample, sample_of, share

CLIENT = """\
Successful requests:                     48
Benchmark duration (s):                  30.51
Output token throughput (tok/s):         201.37
Median TTFT (ms):                        1310.22
P99 TTFT (ms):                           2500.10
"""
SMAPS = """\
7fe3cbfe6000-7fe40bfe6000 rw-p 00000000 00:00 0
Size:            1048320 kB
Rss:              393216 kB
Pss:              393216 kB
VmFlags: rd wr mr mw me ac dd hg
7fe425800000-7fe465800000 rw-p 00000000 00:00 0                          [heap]
Size:            1048576 kB
Rss:              129024 kB
Pss:              129024 kB
VmFlags: rd wr mr mw me ac hg
7fff00000000-7fff00004000 r--p 00000000 00:00 0                          [vvar]
Size:                 16 kB
Rss:                   0 kB
Pss:                   0 kB
VmFlags: rd mr pf io de dd
"""


def test_the_client_s_report() -> None:
    figures = figures_of(CLIENT)
    assert (figures["Successful requests"], figures[THROUGHPUT], figures[FIRST_TOKEN]) == (48, 201.37, 1310.22)


def test_the_pool_is_the_mapping_of_its_size_that_no_core_dump_has() -> None:
    assert touched(mappings(SMAPS), 1 << 30) == 393_216 * 1024
    with pytest.raises(RuntimeError, match="0 mappings look like the KV pool"):
        touched(mappings(SMAPS.replace(" dd hg", " hg")), 1 << 30)


def test_parameters_of_the_default_model() -> None:
    """134,515,008 says its model card; embedding and head are one matrix."""
    model = ModelDescription(
        "", "", "llama", "", 49152, 8192, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, tie_word_embeddings=True
    )
    assert parameters(model) == 134_515_008


def test_the_executor_s_share_counts_only_while_nearly_all_run() -> None:
    """Full from the second sample to the fourth: busy 1 → 4, idle 0.5 → 1.5, so 1 of 4 seconds."""
    samples = [
        Sample(4, 0.0, 0.0),
        Sample(16, 1.0, 0.5),
        Sample(15, 2.0, 1.0),
        Sample(16, 4.0, 1.5),
        Sample(3, 5.0, 9.0),
    ]
    assert share(samples, 16) == 25.0
    with pytest.raises(RuntimeError, match="17 requests never ran at once"):
        share([Sample(15, 0.0, 0.0), Sample(15, 1.0, 0.0)], 17)


def test_the_sample_is_read_from_the_engine_s_metrics() -> None:
    text = """\
# TYPE kvyard_requests_running gauge
kvyard_requests_running 16.0
kvyard_executor_busy_seconds_total 42.25
kvyard_executor_idle_seconds_total{work="runnable"} 0.25
kvyard_executor_idle_seconds_total{work="none"} 5.75
"""
    assert sample_of(text) == Sample(16.0, 42.25, 0.25)


def test_the_step_s_limit_is_the_sum_of_each_turn_s_parts() -> None:
    """Sums 3, 5 and 10 ms: median 5. The medians' sum would be 2 + 2 = 4."""
    times = Times(steps=[0.004, 0.006, 0.009], products=[0.002, 0.004, 0.001], reads=[0.001, 0.001, 0.009])
    assert times.milliseconds() == pytest.approx((6.0, 5.0))


def test_the_machine_in_words() -> None:
    cpuinfo = "model name\t: EPYC\nflags\t\t: fpu avx2 avx512f\n" * 2
    assert machine(cpuinfo) == "2 × EPYC, AVX2, AVX-512, no AVX-512 BF16, no AMX"


def test_the_command_says_nothing_of_this_machine() -> None:
    assert command(["agreed", "other-lengths"], [], 5) == "python -m tools.bench.tables --rounds=5"
    assert command(["other-lengths"], ["start"], 1) == (
        "python -m tools.bench.tables --only=start --table=other-lengths --rounds=1"
    )


A = Row(key="a", work="a", unit="tokens/s", against="peer")
B = Row(key="b", work="b", unit="tokens/s", against="peer")
C = Row(key="c", work="c", unit="tokens/s", against="peer")
LOADS = {
    A: Load(peer="vllm", concurrency=2, prompts=4, input_len=8, output_len=8),
    B: Load(peer="vllm", concurrency=3, prompts=4, input_len=8, output_len=8),
    C: Load(peer="vllm", concurrency=2, prompts=4, input_len=8, output_len=8, flags=("--model={gguf}",)),
}


class Recorded(Peers):
    """Servers that are not there; what was loaded, in order."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int, int]] = []
        self.failing = ""
        self.lost = {"ours": 0, "vllm": 0}

    def flags(self, load: Load) -> list[str]:
        return list(load.flags)

    @contextmanager
    def serving(self, peer: str) -> Iterator[Server]:
        yield Server(peer, None)  # type: ignore[arg-type]

    def load(self, url: str, load: Load, seed: int, may_fail: int = 0) -> Loaded:
        if url == self.failing:
            raise RuntimeError("0 of 4 requests completed\nand more")
        if self.lost[url] > may_fail:
            raise RuntimeError("3 of 4 requests completed")
        self.loaded.append((url, load.prompts, seed))
        return Loaded(10.0 if url == "ours" else 5.0, load.prompts - self.lost[url])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    @contextmanager
    def running(command: str, *flags: str) -> Iterator[Server]:
        if "--model={gguf}" in flags:
            raise RuntimeError("a server ended with code 2")
        yield Server("ours", None)  # type: ignore[arg-type]

    monkeypatch.setattr(peers_module, "running", running)
    return Recorded()


def test_rounds_alternate_and_no_two_loads_of_a_server_share_a_seed(recorded: Recorded) -> None:
    found = dict(compare(recorded, {A: LOADS[A], B: LOADS[B]}, rounds=2))
    assert found == {row: Measured((10.0, 10.0), (5.0, 5.0)) for row in (A, B)}
    first, second = recorded.loaded[:6], recorded.loaded[6:]
    assert first == [
        ("ours", 2, 999),
        ("vllm", 2, 999),
        ("ours", 4, 0),
        ("vllm", 4, 0),
        ("vllm", 4, 1),
        ("ours", 4, 1),
    ]
    assert not {seed for _, _, seed in first} & {seed for _, _, seed in second}


def test_a_server_that_does_not_start_leaves_the_other_rows(recorded: Recorded) -> None:
    found = dict(compare(recorded, LOADS, rounds=1))
    assert found[C] == Measured(missing="failed: a server ended with code 2")
    assert found[A].ours == found[B].ours == (10.0,)


def test_what_the_peer_fails_at_counts_as_done_and_is_told(recorded: Recorded) -> None:
    """One request of four: its 5 tokens/s of three requests are 6.67 of four; of ours none may fail."""
    recorded.lost["vllm"] = 1
    found = dict(compare(recorded, {A: LOADS[A]}, rounds=2))[A]
    assert found.theirs == (5.0 * 4 / 3, 5.0 * 4 / 3)
    assert found.note == "the peer failed at 2 of 8 requests, which count as if they had been done"
    assert Loaded(80.0, 3).as_if_complete(msgspec.structs.replace(LOADS[A], figure=FIRST_TOKEN)) == 80.0
    recorded.lost["ours"] = 1
    assert dict(compare(recorded, {A: LOADS[A]}, rounds=2))[A].missing == "failed: 3 of 4 requests completed"


def test_a_load_that_fails_says_so_in_its_row(recorded: Recorded) -> None:
    recorded.failing = "vllm"
    assert dict(compare(recorded, {A: LOADS[A]}, rounds=1)) == {
        A: Measured(missing="failed: 0 of 4 requests completed\nand more")
    }


def test_without_peers_their_rows_are_skipped_and_ours_are_measured() -> None:
    def fails(rounds: int) -> Measured:
        raise RuntimeError("no such thing\ntrace")

    own = {B: fails, C: lambda rounds: Measured((1.0,) * rounds, (2.0,) * rounds)}
    assert list(measured({A: LOADS[A]}, own, rounds=2, peers=None)) == [
        (A, Measured(missing="skipped: needs PEER and PEERS")),
        (B, Measured(missing="failed: no such thing\ntrace")),
        (C, Measured((1.0, 1.0), (2.0, 2.0))),
    ]
