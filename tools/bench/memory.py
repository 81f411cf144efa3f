"""What an engine takes of memory besides weights and KV pool, after a load.

Memory is Pss: what a process has for itself, and its share of what it maps together with others. Of all processes of
the engine, less each parameter of the model once in the dtype that it is computed in, less the pages of the pool that
have been touched. So a second copy of a matrix counts, and so do the libraries' pages.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import msgspec

from actors.messages.model import ModelDescription
from runner.store.store import resolve
from tools.bench.processes import descendants, load, running
from tools.bench.rows import Measured

_BYTES_PER_VALUE = 2  # bfloat16
POOL_BYTES = 1 << 30


class Mapping(msgspec.Struct, frozen=True):
    size: int  # bytes
    pss: int
    flags: frozenset[str]


def mappings(smaps: str) -> list[Mapping]:
    """Of the text of /proc/PID/smaps."""
    found = []
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE):
        kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", part, re.MULTILINE))
        flags = re.search(r"^VmFlags: (.*)$", part, re.MULTILINE)
        if kilobytes:
            size, pss = (int(kilobytes[name]) * 1024 for name in ("Size", "Pss"))
            found.append(Mapping(size, pss, frozenset(flags[1].split() if flags else ())))
    return found


def parameters(d: ModelDescription) -> int:
    query, key = d.num_heads * d.head_size, d.num_kv_heads * d.head_size
    layer = d.hidden_size * (2 * query + 2 * key + 3 * d.intermediate_size + 2)
    vocabulary = d.vocab_size * d.hidden_size * (1 if d.tie_word_embeddings else 2)
    return d.num_layers * layer + vocabulary + d.hidden_size


def touched(maps: list[Mapping], pool_bytes: int) -> int:
    """Bytes of the pool's mapping that are there. It alone is of that size and left out of core dumps ("dd")."""
    found = [one.pss for one in maps if "dd" in one.flags and pool_bytes * 0.99 <= one.size <= pool_bytes * 1.01]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} mappings look like the KV pool, not one")
    return found[0]


def measure(rounds: int, model: str = "smollm2-135m-instruct") -> Measured:
    weights = parameters(resolve(model)) * _BYTES_PER_VALUE
    found = [_round(model, weights, seed) for seed in range(rounds)]
    engine, worker = (statistics.median(column) / 1e6 for column in zip(*found, strict=True))
    note = f"engine process {engine:.0f} MB, worker {worker:.0f} MB beside {weights / 1e6:.0f} MB of weights"
    return Measured(tuple(sum(one) / 1e6 for one in found), note=note)


def _round(model: str, weights: int, seed: int) -> tuple[int, int]:
    """Bytes above weights and pool: of the engine process, of its worker."""
    with running("serve", "--role=both", f"--model={model}", f"--kv-memory={POOL_BYTES}") as (url, process):
        load(url, concurrency=16, requests=32, input_len=256, output_len=64, seed=seed)
        engine, *others = (mappings(Path(f"/proc/{pid}/smaps").read_text()) for pid in descendants(process.pid))
        worker = [one for maps in others for one in maps]
        above = sum(one.pss for one in worker) - weights - touched(worker, POOL_BYTES)
        return sum(one.pss for one in engine), above
