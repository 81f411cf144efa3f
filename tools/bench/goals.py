"""What is measured against what, and how good it has to be: the rows of the two tables of docs/benchmarks.md.

Lengths are tokens in / tokens out. Nothing is tuned to those of the first table: the second has others.
"""

from __future__ import annotations

from functools import partial

from tools.bench import memory, serving, start, step_ratio, waiting
from tools.bench.peers import FIRST_TOKEN, STORED, Load
from tools.bench.rows import Measure, Row

TOKENS = "tokens/s"
VLLM, LLAMA = "vLLM 0.32.0", "llama.cpp, same GGUF"


def _first_token(key: str, work: str, against: str, goal: float | None, floor: float | None) -> Row:
    return Row(key=key, work=work, unit="ms", against=against, less_is_better=True, goal=goal, floor=floor)


AGREED_LOADS: dict[Row, Load] = {
    Row(key="vllm-16", work="16 at once, 256/128", unit=TOKENS, against=VLLM, goal=2.6, floor=2.0): Load(
        peer="vllm", concurrency=16, prompts=48, input_len=256, output_len=128
    ),
    Row(key="vllm-1", work="1 at once, 256/128", unit=TOKENS, against=VLLM, goal=3.0, floor=2.0): Load(
        peer="vllm", concurrency=1, prompts=4, input_len=256, output_len=128
    ),
    _first_token("vllm-first-token", "first token, 1 at once, 1,024 in", VLLM, 0.5, 0.8): Load(
        peer="vllm", concurrency=1, prompts=8, input_len=1024, output_len=4, figure=FIRST_TOKEN
    ),
    Row(key="vllm-64", work="64 at once, 128/64", unit=TOKENS, against=VLLM, goal=3.0, floor=2.0): Load(
        peer="vllm", concurrency=64, prompts=128, input_len=128, output_len=64
    ),
    Row(key="llama-1", work="1 at once, 256/128, as stored", unit=TOKENS, against=LLAMA, goal=1.3, floor=1.0): Load(
        peer="llama", concurrency=1, prompts=8, input_len=256, output_len=128, flags=STORED
    ),
    Row(key="llama-16", work="16 at once, 256/128, as stored", unit=TOKENS, against=LLAMA, goal=2.5, floor=1.5): Load(
        peer="llama", concurrency=16, prompts=48, input_len=256, output_len=128, flags=STORED
    ),
    _first_token("llama-first-token", "first token, 1 at once, 256 in, as stored", LLAMA, 0.8, 1.0): Load(
        peer="llama", concurrency=1, prompts=8, input_len=256, output_len=4, figure=FIRST_TOKEN, flags=STORED
    ),
}
AGREED_OWN: dict[Row, Measure] = {
    Row(
        key="step-16",
        work="decode step, batch 16",
        unit="ms",
        against="its weight products and one read of its KV",
        less_is_better=True,
        goal=1.3,
        floor=1.6,
    ): step_ratio.measure,
    Row(
        key="waiting-16",
        work="the executor waits although work is runnable, 16 running",
        unit="%",
        less_is_better=True,
        goal=5,
        floor=10,
    ): partial(waiting.measure, num_running=16, input_len=256, output_len=128),
    Row(
        key="waiting-256",
        work="the same, 256 running",
        unit="%",
        less_is_better=True,
        goal=5,
        floor=10,
    ): partial(waiting.measure, num_running=256, input_len=32, output_len=96),
    Row(
        key="disaggregated",
        work="prefill/decode, 16 at once, 256/128",
        unit=TOKENS,
        against="aggregated, same two cores",
        goal=0.9,
        floor=0.8,
    ): serving.disaggregated,
    Row(
        key="start",
        work="start of an engine, warm caches, to ready",
        unit="s",
        less_is_better=True,
        goal=5,
        floor=10,
    ): start.measure,
    Row(
        key="memory", work="memory above weights and KV pool", unit="MB", less_is_better=True, goal=400, floor=800
    ): memory.measure,
}
OTHER_LOADS: dict[Row, Load] = {
    Row(key="vllm-16-long-answers", work="16 at once, 32/256", unit=TOKENS, against=VLLM): Load(
        peer="vllm", concurrency=16, prompts=32, input_len=32, output_len=256
    ),
    Row(key="vllm-16-long-prompts", work="16 at once, 2,048/16", unit=TOKENS, against=VLLM): Load(
        peer="vllm", concurrency=16, prompts=32, input_len=2048, output_len=16
    ),
    Row(key="vllm-16-mixed", work="16 at once, 80–720/20–180", unit=TOKENS, against=VLLM): Load(
        peer="vllm", concurrency=16, prompts=48, input_len=400, output_len=100, spread=0.8
    ),
    _first_token("vllm-first-token-mixed", "first token, 4 at once, 80–720/20–180", VLLM, None, None): Load(
        peer="vllm", concurrency=4, prompts=16, input_len=400, output_len=100, spread=0.8, figure=FIRST_TOKEN
    ),
    Row(key="llama-16-long-answers", work="16 at once, 32/256, as stored", unit=TOKENS, against=LLAMA): Load(
        peer="llama", concurrency=16, prompts=32, input_len=32, output_len=256, flags=STORED
    ),
    Row(key="llama-1-mixed", work="1 at once, 80–720/20–180, as stored", unit=TOKENS, against=LLAMA): Load(
        peer="llama", concurrency=1, prompts=6, input_len=400, output_len=100, spread=0.8, flags=STORED
    ),
}
