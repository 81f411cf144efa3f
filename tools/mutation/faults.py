"""Forty faults of one line each, spread over every module of the scheduler core.

`old` stands exactly once in `actors/scheduling/MODULE.py`. None of them is equivalent: each breaks a rule that the
scenarios, the hand-computed cases or the properties know.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    module: str
    old: str
    new: str
    what: str


FAULTS = (
    Fault("running", "len(running) and step.budget > 0:", "len(running) and step.budget >= 0:", "budget overdrawn"),
    Fault("running", "max_model_len - 1 - computed", "max_model_len - computed", "no room kept for the sampled token"),
    Fault("running", "computed + 2 - placeholders >=", "computed + 1 - placeholders >=", "planned past max_tokens"),
    Fault("running", "count + lookahead) // block_size)", "count + lookahead + 1) // block_size)", "a block too early"),
    Fault("running", "if victim_index < index:", "if victim_index <= index:", "a victim hides its neighbour"),
    Fault("running", "else len(running) - 1\n", "else 0\n", "the first is preempted instead of the last"),
    Fault("queues", "extendleft(reversed(requests))", "extendleft(requests)", "skipped requests change places"),
    Fault("admission", "waiting.peek().order < skipped", "waiting.peek().order > skipped", "priority upside down"),
    Fault("candidate", "len(adapters) >= config.max_loras", "len(adapters) > config.max_loras", "an adapter too many"),
    Fault("candidate", "request.num_computed_tokens -= 1  #", "pass  #", "a full load leaves nothing to compute"),
    Fault("candidate", "if state.running else 0", "if state.waiting else 0", "watermark in an empty engine"),
    Fault("candidate", "if other is not request)", "if other.grant is None)", "a load leaves no room for the others"),
    Fault("kv_manager", "(len(tokens) - 1) // size", "len(tokens) // size", "the last token is a prefix hit"),
    Fault("kv_manager", "missing + self.pool.num_unreferenced(hits)", "missing", "free hits are counted as free"),
    Fault("kv_manager", "cache_salt if index == 0", "cache_salt if index == 1", "the first block is not isolated"),
    Fault("block_pool", "self._link(self._previous[0], block)", "self._link(0, block)", "cached blocks evicted first"),
    Fault("block_pool", "self.ref_counts[block] += 1", "self.ref_counts[block] = 1", "a shared block freed too early"),
    Fault("prefix_cache", "if not entry.blocks:", "if len(entry.blocks) < 2:", "an entry lost with its duplicate"),
    Fault("grants", "if grant.fence_step in steps", "if grant.fence_step not in steps", "fences the wrong way round"),
    Fault("results", "step.epochs[row] != request.epoch", "step.epochs[row] > request.epoch", "void tokens are used"),
    Fault(
        "results", "computed_tokens - (expected - count)", "computed_tokens - expected", "accepted drafts taken back"
    ),
    Fault("results", "else first * state", "else (first + 1) * state", "a bad block is taken for good"),
    Fault("stop", "num_outputs >= request.min_tokens", "num_outputs > request.min_tokens", "min_tokens"),
    Fault("transfers", "load.grant.request_id != request_id", "load.quiet", "a report for somebody else's load"),
    Fault(
        "transfers", "min(state.config.load_timeout_s, remaining / 2)", "remaining", "a load that outlives its request"
    ),
    Fault("encoder", "start - self._ahead, 0)\n", "start - self._ahead, 1)\n", "tokens without their encoder output"),
    Fault("step", "self.budget += self.counts[row]", "self.budget += 1", "a victim's tokens are not given back"),
    Fault("state", "        request.drafts = ()\n", "", "drafts outlive a preemption"),
    Fault("core", "self._deadlines[0][0] <= now", "self._deadlines[0][0] < now", "late by one deadline"),
    Fault("impasse", "_revoke(state, waiting_holders[-1], now)", "return False", "nobody gives blocks back"),
    Fault("transfers", "lease.revoked = True", "lease.revoked = False", "a denial after an abort leaks its blocks"),
    Fault("encoder", "next(iter(self._evictable))", "next(reversed(self._evictable))", "the newest output is evicted"),
    Fault(
        "results",
        "            state.kv.unregister(request, request.num_computed_tokens)",
        "            pass",
        "bad KV hit",
    ),
    Fault("results", "num_dropped = count - len(tokens)", "num_dropped = 0", "tokens behind a stop are cached"),
    Fault(
        "results",
        "request.num_cached_tokens, request.num_computed_tokens)",
        "request.num_cached_tokens, 1 << 30)",
        "failed tokens count as cached",
    ),
    Fault(
        "state", "fence = next(reversed(self.in_flight))", "fence = request.last_step", "a fence that ends too early"
    ),
    Fault("running", "request.starved = not running", "request.starved = False", "nobody is known to starve"),
    Fault(
        "candidate", "if request.starved and state", "if False and state", "who starves does not let others go first"
    ),
    Fault(
        "candidate",
        "count > step.budget or num_computed + count > config.max_model_len",
        "count > step.budget",
        "padded past the end of the context",
    ),
    Fault("impasse", "if state.in_flight or not nothing", "if not nothing", "given up while a step is in flight"),
)
