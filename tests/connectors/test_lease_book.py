"""The lease book: its rules one by one, then anything in any order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from actors.messages.lease import (
    LeaseRefused,
    LeaseReleased,
    LeaseRenewed,
    LeasesRenewed,
    OpenLease,
    ReadBlocks,
    RefusedLease,
    ReleaseLease,
    ReleaseOutcome,
    RenewLease,
    RenewLeases,
)
from actors.messages.transfer import BlocksSent, LeaseExpired
from connectors.lease_book import AbortCopies, Lease, LeaseBook
from tests.connectors.harness import LAYOUT, grant_order, int32

KEY, WRONG_KEY = b"k" * 16, b"w" * 16


def new_book(lease_s: float = 30.0) -> LeaseBook:
    return LeaseBook(engine_id="prefill-0", epoch=1, layout=LAYOUT, lease_s=lease_s, transports=("nixl", "tcp"))


def granted(book: LeaseBook, lease_id: int = 1, now: float = 0.0) -> Lease:
    lease = book.grant(lease_id, KEY, grant_order(f"r{lease_id}", [4, 5]), now)
    assert lease is not None
    return lease


def opening(lease_id: int = 1, **changes: Any) -> OpenLease:
    request = OpenLease("prefill-0", 1, lease_id, KEY, LAYOUT, "decode-0", "nixl")
    return msgspec.structs.replace(request, **changes)


def refusal(book: LeaseBook, request: OpenLease, now: float = 0.0) -> LeaseRefused:
    answer = book.open(request, now)
    assert isinstance(answer, LeaseRefused)
    return answer


def test_release_is_good_once() -> None:
    book = new_book()
    granted(book)
    assert isinstance(book.open(opening(), 1.0), Lease)
    assert book.release(ReleaseLease(1, 1, KEY)) == LeaseReleased(1, ReleaseOutcome.GOOD)
    assert book.take_effects() == [BlocksSent("r1", 1)]
    assert book.release(ReleaseLease(1, 1, KEY)) == LeaseReleased(1, ReleaseOutcome.UNKNOWN)
    assert (book.take_effects(), book.late) == ([], 1)
    book.check()


def test_heartbeats_extend_by_two_thirds_of_the_lease_but_never_shorten() -> None:
    """Reference table, row 70: lease 30 from t=0, heartbeats at 10 and 25: deadline 30, 30, 45; freed at 45."""
    book = new_book(30.0)
    lease = granted(book)
    assert book.renew(RenewLease(1, 1, KEY), 10.0) == LeaseRenewed(1, 20.0)
    assert lease.deadline == 30.0
    assert book.renew_all(RenewLeases(1, (99, 1), (KEY, KEY)), 25.0) == LeasesRenewed((0.0, 20.0))
    assert lease.deadline == 45.0
    book.expire(44.999)
    assert book.take_effects() == []
    book.expire(45.0)
    assert book.take_effects() == [LeaseExpired("r1", 1)]
    assert book.renew(RenewLease(1, 1, KEY), 46.0) == LeaseRenewed(1, 0.0)
    assert new_book(45.0).grant(1, KEY, grant_order("r", [1]), 0.0) is not None


def test_expiry_does_not_stop_at_a_lease_that_was_renewed() -> None:
    """vllm#58222: a reaper in insertion order stopped at the first lease that was not due."""
    book = new_book(30.0)
    for lease_id, now in ((1, 0.0), (2, 1.0), (3, 2.0)):
        granted(book, lease_id, now)
    book.renew(RenewLease(1, 1, KEY), 29.0)
    book.expire(32.0)
    assert book.take_effects() == [LeaseExpired("r2", 1), LeaseExpired("r3", 1)]
    assert book.next_deadline() == 49.0
    book.check()


def test_what_arrives_before_the_owner_looked_at_the_clock_counts() -> None:
    """vllm#54348: a release that is there is applied before expiry, although the deadline has passed."""
    book = new_book(30.0)
    granted(book)
    assert book.release(ReleaseLease(1, 1, KEY)).outcome is ReleaseOutcome.GOOD
    book.expire(31.0)
    assert book.take_effects() == [BlocksSent("r1", 1)]


def test_an_expired_lease_cannot_be_opened_and_its_release_says_expired() -> None:
    book = new_book(30.0)
    granted(book)
    assert refusal(book, opening(), 30.0).reason is RefusedLease.EXPIRED
    assert book.take_effects() == [LeaseExpired("r1", 1)]
    assert refusal(book, opening(), 31.0).reason is RefusedLease.EXPIRED
    assert book.release(ReleaseLease(1, 1, KEY)).outcome is ReleaseOutcome.EXPIRED


def test_a_forged_capability_gets_the_answer_of_a_lease_that_never_was() -> None:
    book = new_book()
    granted(book, 1)
    granted(book, 2)
    book.revoke("r2", 1)
    answers = {
        msgspec.structs.replace(refusal(book, opening(lease_id, capability=WRONG_KEY)), lease_id=0)
        for lease_id in (1, 2, 77)
    }
    assert [answer.reason for answer in answers] == [RefusedLease.UNKNOWN]
    for lease_id in (1, 2, 77):
        assert book.release(ReleaseLease(1, lease_id, WRONG_KEY)).outcome is ReleaseOutcome.UNKNOWN
        assert book.renew(RenewLease(1, lease_id, WRONG_KEY), 0.0).remaining_s == 0.0
    assert refusal(book, opening(77, capability=bytes(16))).reason is RefusedLease.UNKNOWN
    assert refusal(book, opening(capability=b"")).reason is RefusedLease.UNKNOWN
    assert book.num_live == 1


def test_an_incompatible_layout_is_refused_with_both_values() -> None:
    book = new_book()
    granted(book)
    theirs = msgspec.structs.replace(LAYOUT, dtype="float32", num_layers=5, kv_dtype="int8")
    answer = refusal(book, opening(layout=theirs))
    assert answer.reason is RefusedLease.INCOMPATIBLE
    assert "dtype: ours 'bfloat16', theirs 'float32'" in answer.detail
    assert "num_layers: ours 4, theirs 5" in answer.detail
    assert "kv_dtype: ours 'auto', theirs 'int8'" in answer.detail
    assert "transport: ours 'nixl/tcp', theirs 'smoke'" in refusal(book, opening(transport="smoke")).detail


@pytest.mark.parametrize("named", [{"epoch": 2}, {"engine_id": "prefill-1"}])
def test_a_ticket_of_another_engine_or_another_life_of_it_is_refused(named: dict[str, Any]) -> None:
    book = new_book()
    granted(book)
    answer = refusal(book, opening(**named))
    assert answer.reason is RefusedLease.WRONG_EPOCH
    assert "prefill-0 epoch 1" in answer.detail
    assert book.release(ReleaseLease(2, 1, KEY)).outcome is ReleaseOutcome.UNKNOWN
    assert book.num_live == 1


def test_bytes_being_copied_out_are_kept_until_the_copy_is_quiet() -> None:
    book = new_book(30.0)
    granted(book)
    for _ in range(2):
        assert isinstance(book.begin_copy(ReadBlocks(1, 1, KEY, int32([0]))), Lease)
    book.expire(30.0)
    assert book.take_effects() == [AbortCopies(1)]
    assert isinstance(book.begin_copy(ReadBlocks(1, 1, KEY, int32([0]))), LeaseRefused)
    assert book.release(ReleaseLease(1, 1, KEY)).outcome is ReleaseOutcome.EXPIRED
    book.end_copy(1)
    assert book.take_effects() == []
    book.end_copy(1)
    assert book.take_effects() == [LeaseExpired("r1", 1)]
    book.check()


def test_a_duplicate_grant_is_ignored_and_a_late_revocation_too() -> None:
    book = new_book()
    granted(book)
    assert book.grant(2, KEY, grant_order("r1", [9]), 0.0) is None
    book.revoke("r1", 1)
    book.revoke("r1", 1)
    book.revoke("r1", 2)
    assert book.take_effects() == [LeaseExpired("r1", 1)]
    assert (book.granted, book.duplicates, book.late) == (1, 1, 2)


class AnyOrder(RuleBasedStateMachine):
    """Late, lost, duplicated, reordered, forged: each granted lease ends exactly once, and nothing ever raises."""

    leases = Bundle("leases")
    copies = Bundle("copies")

    def __init__(self) -> None:
        super().__init__()
        self.book = new_book(10.0)
        self.now, self.next_id = 0.0, 1
        self.ends: dict[str, int] = {}
        self.open_copies: dict[int, int] = {}
        self.known_good: set[str] = set()

    def take(self) -> None:
        for effect in self.book.take_effects():
            if not isinstance(effect, AbortCopies):
                self.ends[effect.request_id] = self.ends.get(effect.request_id, 0) + 1
                lease_id = int(effect.request_id[1:])
                assert not self.open_copies.get(lease_id), "freed under a copy"
                assert isinstance(effect, BlocksSent) == (effect.request_id in self.known_good)

    @rule(target=leases)
    def grant(self) -> int:
        lease_id, self.next_id = self.next_id, self.next_id + 1
        granted(self.book, lease_id, self.now)
        return lease_id

    @rule(lease_id=leases)
    def grant_again(self, lease_id: int) -> None:
        live = f"r{lease_id}" not in self.ends
        assert not live or self.book.grant(10**6, KEY, grant_order(f"r{lease_id}", [4]), self.now) is None

    @rule(lease_id=leases, right=st.booleans())
    def open(self, lease_id: int, right: bool) -> None:
        answer = self.book.open(opening(lease_id, capability=KEY if right else WRONG_KEY), self.now)
        assert right or isinstance(answer, LeaseRefused)
        self.take()

    @rule(lease_id=leases)
    def renew(self, lease_id: int) -> None:
        remaining = self.book.renew(RenewLease(1, lease_id, KEY), self.now).remaining_s
        assert (remaining == 0) or f"r{lease_id}" not in self.ends

    @rule(lease_id=leases, epoch=st.sampled_from([1, 1, 1, 2]), right=st.sampled_from([True, True, False]))
    def release(self, lease_id: int, epoch: int, right: bool) -> None:
        name = f"r{lease_id}"
        outcome = self.book.release(ReleaseLease(epoch, lease_id, KEY if right else WRONG_KEY)).outcome
        if outcome is ReleaseOutcome.GOOD:
            assert right
            assert epoch == 1
            assert name not in self.ends
            assert name not in self.known_good, "good twice"
            self.known_good.add(name)
        self.take()

    @rule(target=copies, lease_id=leases)
    def begin_copy(self, lease_id: int) -> int:
        if isinstance(self.book.begin_copy(ReadBlocks(1, lease_id, KEY, int32([0]))), LeaseRefused):
            return 0
        assert f"r{lease_id}" not in self.ends
        self.open_copies[lease_id] = self.open_copies.get(lease_id, 0) + 1
        return lease_id

    @rule(lease_id=consumes(copies))
    def end_copy(self, lease_id: int) -> None:
        if lease_id:
            self.open_copies[lease_id] -= 1
            self.book.end_copy(lease_id)
            self.take()

    @rule(lease_id=leases)
    def revoke(self, lease_id: int) -> None:
        self.book.revoke(f"r{lease_id}", 1)
        self.take()

    @rule(seconds=st.floats(0.0, 15.0), looked=st.booleans())
    def pass_time(self, seconds: float, looked: bool) -> None:
        self.now += seconds
        if looked:
            self.book.expire(self.now)
            self.take()

    @invariant()
    def consistent(self) -> None:
        self.book.check()
        assert all(count == 1 for count in self.ends.values())

    def teardown(self) -> None:
        for lease_id in self.open_copies:
            while self.open_copies[lease_id]:
                self.open_copies[lease_id] -= 1
                self.book.end_copy(lease_id)
        self.take()
        self.book.expire(self.now + 1000.0)
        self.take()
        assert sorted(self.ends) == sorted(f"r{lease_id}" for lease_id in range(1, self.next_id))
        assert set(self.ends.values()) <= {1}
        assert self.book.next_deadline() is None


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
