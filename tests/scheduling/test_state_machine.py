"""Hypothesis drives the real core with everything the world may do to it, in tiny pools.

After every event `check()` recomputes the invariants (conservation of blocks among them), the simulated worker proves
that each row reads the KV of its own tokens, and each ticket's obligation is discharged exactly once. At the end all
reports are delivered and everything that fits must finish (liveness); the same inputs must give the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from actors.messages.plan import StepResult
from actors.messages.request import EngineRequest
from actors.messages.transfer import BlocksLanded, BlocksSent, LeaseExpired, TransferFailed, TransferReport
from actors.scheduling.core import SchedulerCore
from actors.scheduling.orders import int32
from actors.scheduling.request import EncoderInput, RequestExtras
from tests.scheduling.endings import Endings
from tests.scheduling.machine import STOP_TOKEN
from tests.scheduling.scripted import decide, script
from tests.scheduling.simulated import ints


def complaint_about(core: SchedulerCore, result: StepResult, bad: Mapping[str, Sequence[int]], now: float) -> str:
    try:
        core.apply_step(result, bad, now)
    except ValueError as error:
        return str(error)
    return ""


REQUEST: dict[str, Any] = {
    "length": st.integers(1, 20),
    "family": st.integers(0, 2),
    "max_tokens": st.integers(1, 8),
    "kind": st.sampled_from(["plain", "plain", "ticket", "ticket", "lease", "in step"]),
    "is_undecided": st.sampled_from([False] * 5 + [True]),
    "priority": st.integers(0, 2),
    "patience": st.sampled_from([float("inf"), float("inf"), 6.0, 25.0]),
    "shift": st.sampled_from([0, 0, -1, 3]),
    "lora": st.sampled_from([None, None, "x", "y", "z"]),
    "salt": st.sampled_from([None, None, None, "s"]),
    "item": st.sampled_from([None, None, (0, 2, "h"), (3, 2, "h"), (1, 5, "long")]),
    "gated": st.sampled_from([False] * 5 + [True]),
}


class SchedulerMachine(Endings):
    loses = True  # reports and results
    gives_malformed = True  # results, which raise

    @rule(**REQUEST)
    def add(
        self,
        length: int,
        family: int,
        max_tokens: int,
        kind: str,
        priority: int,
        patience: float,
        shift: int,
        lora: str | None,
        salt: str | None,
        item: tuple[int, int, str] | None,
        gated: bool,
        is_undecided: bool,
    ) -> None:
        request_id = f"r{len(self.added)}"
        tokens = tuple(10 * family + place for place in range(length))
        ticket = None
        if kind == "ticket":
            remote = tuple(10 * family + place for place in range(max(length + shift, 1)))
            ticket = self.transfers.ticket(remote, len(self.added))
        request = EngineRequest(
            request_id,
            tokens,
            max_tokens=max_tokens,
            eos_token_ids=(STOP_TOKEN,),
            priority=priority,
            arrival=self.now,
            deadline=self.now + patience,
            do_remote_decode=kind == "lease",
            ticket=ticket,
            lora=lora if kind in ("plain", "in step") else None,
            cache_salt=salt if kind in ("plain", "in step") else None,
        )
        inputs: tuple[EncoderInput, ...] = ()
        if kind in ("plain", "in step") and item is not None and item[0] + item[1] <= length:
            inputs = (EncoderInput(item[2], item[0], item[1]),)
        self.extras[request_id] = extras = RequestExtras(inputs, gated)
        self.added[request_id] = request
        self.outputs[request_id] = []
        self.transfers.note(request)
        in_step = 0
        if kind == "in step":
            in_step = self.in_step[request_id] = max(length + shift - 1, 1)
        self.give(lambda core: script(core, request_id, is_undecided=is_undecided, in_step=in_step))
        now = self.now
        self.give(lambda core: core.add(request, now, extras))

    # Each rule is chosen as often as another one.

    @rule(**REQUEST)
    def add_another(self, **fields: Any) -> None:
        self.add(**fields)

    @rule(times=st.integers(1, 8))
    def steps(self, times: int) -> None:
        """The usual course: each time plan, or apply the oldest result; sometimes a report comes in between."""
        for _ in range(times):
            self.step()
            self.core.check()
            if self.transfers.due and self.rng.random() < 0.3:
                self.bytes_come()
                self.give_report(self.rng.randrange(8))
                self.core.check()

    @rule(times=st.integers(1, 3))
    def few_steps(self, times: int) -> None:
        """Without a look in between, and without a report."""
        for _ in range(times):
            self.step()

    @precondition(lambda self: self.worker.plans)
    @rule()
    def run(self) -> None:
        self.run_oldest()

    @precondition(lambda self: self.returned)
    @rule(place=st.integers(0, 50))
    def give_any_result(self, place: int) -> None:
        """Also one that comes before an older step's."""
        self.give_result(place % len(self.returned))

    @precondition(lambda self: self.transfers.due)
    @rule(place=st.integers(0, 50))
    def deliver(self, place: int) -> None:
        """Any report that is due, so also the end of a lease before its grant, or quiet before the failure."""
        self.give_report(place)

    @precondition(lambda self: self.added)
    @rule(place=st.integers(0, 50))
    def abort(self, place: int) -> None:
        request_id = self.any_request(place)
        self.abort_one(request_id)
        assert request_id not in self.core.live_request_ids()

    @precondition(lambda self: self.loses and (self.transfers.due or self.returned))
    @rule(place=st.integers(0, 50), is_lost=st.sampled_from([False, False, True]))
    def lose(self, place: int, is_lost: bool) -> None:
        """What never comes: what it would have freed stays accounted for, and nobody else is held up by a report."""
        if not is_lost:
            return
        place %= len(self.transfers.due) + len(self.returned)
        if place < len(self.transfers.due):
            self.lost_generations.add(self.transfers.lose(place))
        else:
            del self.returned[place - len(self.transfers.due)]
            self.num_lost_results += 1

    @precondition(lambda self: self.added)
    @rule(place=st.integers(0, 50), what=st.sampled_from(["grammar", "connector", "drafts"]))
    def word_comes(self, place: int, what: str) -> None:
        """Also for requests that are gone, or never waited for one."""
        request_id, now = self.any_request(place), self.now
        if what == "grammar":
            self.give(lambda core: core.grammar_ready(request_id))
        elif what == "connector":
            self.give(lambda core: decide(core, request_id, now))
        elif self.config.num_spec_tokens and not self.config.async_scheduling:
            tokens = [5] * (1 + place % self.config.num_spec_tokens)
            self.give(lambda core: core.set_drafts(request_id, tokens))

    @rule(what=st.sampled_from(["pause", "resume", "resume", "reset", "preempt", "time", "time"]), how=st.booleans())
    def intervenes(self, what: str, how: bool) -> None:
        now = self.now
        if what == "pause":
            self.give(lambda core: core.pause("new" if how else "all"))
        elif what == "resume":
            self.give(lambda core: core.pause("none"))
        elif what == "time":
            self.now = now = now + (0.5 if how else 3.0)
            self.give(lambda core: core.expire(now))
            deadline = self.core.next_deadline()
            assert deadline is None or deadline > now
        elif how:
            self.give(lambda core: core.reset_prefix_cache(now, preempt_running=what == "preempt"))

    @precondition(lambda self: self.transfers.delivered or self.results)
    @rule(place=st.integers(0, 50), is_known=st.booleans())
    def late_message(self, place: int, is_known: bool) -> None:
        """One that has been delivered, or that nobody ever waited for."""
        seen: list[TransferReport | StepResult] = [*self.transfers.delivered, *self.results]
        strange: list[TransferReport | StepResult] = [
            StepResult(999_999, b"", b""),
            BlocksLanded("r0", 999_999),
            TransferFailed("nobody", 1, "expired"),
        ]
        message = seen[place % len(seen)] if is_known else strange[place % 3]
        now, late = self.now, self.core.stats().late_events_total
        before = len(self.answers)
        self.give(lambda core: core.apply(message, now))
        assert self.answers[before][1] == []
        if isinstance(message, StepResult | BlocksLanded | TransferFailed | BlocksSent | LeaseExpired):
            assert self.core.stats().late_events_total == late + 1

    @precondition(lambda self: self.gives_malformed and self.returned)
    @rule(place=st.integers(0, 50), what=st.sampled_from(["row", "token", "more", "block"]))
    def malformed_result(self, place: int, what: str) -> None:
        """It is refused, and the right one may follow."""
        result = self.returned[place % len(self.returned)].result
        counts, tokens = ints(result.num_sampled), ints(result.sampled_token_ids)
        bad: dict[str, list[int]] = {}
        if what == "row":
            counts.append(0)
        elif what == "token":
            tokens.append(5)
        elif what == "more" or not self.core.running:
            counts[0] += 5
            tokens += [5] * 5
        else:
            bad = {self.core.running[0].request_id: [99]}
        wrong, now = StepResult(result.step, int32(counts), int32(tokens)), self.now
        assert self.give(lambda core: complaint_about(core, wrong, bad, now))

    def any_request(self, place: int) -> str:
        return list(self.added)[place % len(self.added)]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


class FreshMachine(SchedulerMachine):
    """Other runs each time. A failure prints the blob with which it comes again: `@reproduce_failure` on the test."""


TestSchedulerAfresh = FreshMachine.TestCase
TestSchedulerAfresh.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=False,  # nor where CI is set
    database=None,
    print_blob=True,
)
