"""From the samples of a run to its figures. Pure.

Every request is in `completed` or in `failed`; latencies are those of completed requests alone. The client
measures how late its own event loop ran: when that could have made the latencies, the report gives no verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from tools.load.sample import Sample

# Share of the mean time between chunks that the client's own loop may be late, on average, before it is the bottleneck.
TOLERATED_LAG = 0.1


class Distribution(msgspec.Struct, frozen=True):
    """Seconds; percentiles by linear interpolation between the closest ranks."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        if not values:
            return None
        ordered = sorted(values)
        return cls(sum(ordered) / len(ordered), *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


def percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str
    concurrency: int
    requests: int
    input_len: int
    output_len: int
    seed: int
    completed: int
    failed: int
    failures: dict[str, int]
    duration_s: float  # first request made to last answer ended
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    time_to_first_token_s: Distribution | None
    time_between_tokens_s: Distribution | None  # each request's mean, tokens by the server's usage
    time_between_chunks_s: Distribution | None  # every gap of every stream; a chunk may carry several tokens
    end_to_end_s: Distribution | None
    connection_wait_s: Distribution | None  # in none of the latencies above
    client_lag_s: Distribution | None
    verdict: str  # "ok", or why the figures say nothing of the server


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    url: str
    model: str
    concurrency: int
    input_len: int
    output_len: int
    seed: int


def report_of(run: Run, samples: Sequence[Sample], lags: Sequence[float]) -> Report:
    """`lags`: how late the client's event loop woke, sampled through the run, seconds."""
    good = [sample for sample in samples if sample.failure is None]
    failures = Counter(sample.failure for sample in samples if sample.failure is not None)
    duration = max((s.ended for s in samples), default=0.0) - min((s.began for s in samples), default=0.0)
    output_tokens = sum(sample.output_tokens for sample in good)
    chunks = Distribution.of([gap for sample in good for gap in sample.times_between_chunks])
    lag = Distribution.of(lags)
    return Report(
        **msgspec.structs.asdict(run),
        requests=len(samples),
        completed=len(good),
        failed=len(samples) - len(good),
        failures=dict(failures.most_common()),
        duration_s=duration,
        input_tokens=sum(sample.prompt_tokens for sample in good),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration if duration else 0.0,
        requests_per_s=len(good) / duration if duration else 0.0,
        time_to_first_token_s=Distribution.of([sample.time_to_first_token for sample in good]),
        time_between_tokens_s=Distribution.of([t for s in good if (t := s.time_between_tokens) is not None]),
        time_between_chunks_s=chunks,
        end_to_end_s=Distribution.of([sample.end_to_end for sample in good]),
        connection_wait_s=Distribution.of([sample.connection_wait for sample in good]),
        client_lag_s=lag,
        verdict=_verdict(good, chunks, lag),
    )


def _verdict(good: Sequence[Sample], chunks: Distribution | None, lag: Distribution | None) -> str:
    if not good:
        return "none: no request succeeded"
    if lag is not None and chunks is not None and lag.mean > TOLERATED_LAG * chunks.mean:
        return (
            f"none: the client was the bottleneck, its event loop ran {lag.mean * 1e3:.1f} ms late on average while "
            f"chunks came every {chunks.mean * 1e3:.1f} ms; run it on another machine or with less concurrency"
        )
    return "ok"
