"""What must be true when the state machine's run is over: nothing is held, everybody is answered, twice the same."""

from __future__ import annotations

from actors.messages.errors import RefusalReason
from actors.messages.request import FinishReason
from tests.scheduling.machine import SchedulerWorld
from tests.scheduling.scripted import decide


class Endings(SchedulerWorld):
    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.give(lambda core: core.pause("none"))
        if self.lost_generations or self.num_lost_results:
            self.all_is_accounted_for()
            return
        for request_id in self.added:
            self.nothing_is_missing(request_id)
        self.all_come_to_their_end()
        self.all_is_given_back()
        self.every_answer_is_right()
        self.same_inputs_same_plans()

    def nothing_is_missing(self, request_id: str) -> None:
        now = self.now
        self.give(lambda core: core.grammar_ready(request_id))
        self.give(lambda core: decide(core, request_id, now))

    def all_come_to_their_end(self) -> None:
        """With the engine's rules. With the reference's they may stand still, or change places, till one is aborted."""
        patience = self.config.standstill_patience
        most_rounds = 200 + 100 * len(self.added) * self.is_robust
        idle = rounds = 0
        while self.core.live_request_ids() or self.transfers.due or self.num_in_flight:
            progress = bool(self.transfers.due or self.num_in_flight)
            if self.transfers.due:
                self.bytes_come()
                self.give_report(self.rng.randrange(8))
            self.run_and_give()
            while self.num_in_flight < self.depth and self.core.has_runnable():
                progress |= bool(self.plan().request_ids)
            if patience and not progress:
                progress = bool(self.plan().request_ids)
            self.core.check()
            idle = 0 if progress else idle + 1
            rounds += 1
            if rounds < most_rounds and idle < 3 + patience:
                continue
            live = self.core.live_request_ids()
            assert not self.is_robust, f"stuck, or busy and getting nowhere: {[self.core.live(name) for name in live]}"
            assert live
            self.abort_one(live[0])
            idle = rounds = 0

    def abort_one(self, request_id: str) -> None:
        self.disturbed.add(request_id)
        now = self.now
        self.give(lambda core: core.abort(request_id, now, "test"))

    def all_is_accounted_for(self) -> None:
        """After a loss: everybody can be aborted, and only blocks of what has not ended are not free."""
        now = self.now
        for request_id in self.core.live_request_ids():
            self.abort_one(request_id)
        while self.worker.plans or self.returned:
            self.run_and_give()
        while self.transfers.due:
            self.give_report(0)
        self.core.check()
        assert self.core.live_request_ids() == []
        grants = self.core.blocks_report(now).grants
        if self.num_lost_results:
            grants = tuple(grant for grant in grants if grant.state != "fenced")
        assert {grant.generation for grant in grants} <= self.lost_generations
        self.same_inputs_same_plans()

    def all_is_given_back(self) -> None:
        stats = self.core.stats()
        assert stats.blocks_free == self.config.usable_blocks
        assert self.core.blocks_report(self.now).grants == ()
        assert self.transfers.held == set(), "a ticket whose obligation was forgotten"
        assert len(self.transfers.ended) == len(set(self.transfers.ended))

    def every_answer_is_right(self) -> None:
        for request_id, request in self.added.items():
            last = self.outputs[request_id][-1]
            assert last.finish_reason is not None
            most = min(len(request.prompt_token_ids) + request.max_tokens, 40)
            if request_id in self.disturbed or last.error == RefusalReason.DEADLINE_EXCEEDED:
                continue
            fits = -(-most // self.config.block_size) <= self.config.usable_blocks
            reasons = set()
            if not fits:
                reasons.add(RefusalReason.EXCEEDS_KV_CAPACITY)
            if any(item.length > min(self.encoder_limits) for item in self.extras[request_id].encoder_inputs):
                reasons.add(RefusalReason.INVALID_REQUEST)
            if request.do_remote_decode:
                reasons.add(RefusalReason.KV_SEND_FAILED)
            is_loaded = request.ticket is not None or request_id in self.in_step
            if is_loaded and self.config.kv_load_failure_policy == "fail":
                reasons.add(RefusalReason.KV_LOAD_FAILED)
            assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) or last.error in reasons, last

    @property
    def encoder_limits(self) -> tuple[int, int]:
        return self.config.encoder_budget, self.config.encoder_cache

    def same_inputs_same_plans(self) -> None:
        core = self.twin()
        for call, answer in zip(self.inputs, self.answers, strict=True):
            assert (call(core), core.take_effects()) == answer
