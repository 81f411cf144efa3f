from __future__ import annotations

import random

import anyio
import anyio.lowlevel
import pytest

from actors.kernel.mailbox import EndOfMail, Envelope, Mailbox
from actors.kernel.reply import Reply
from actors.messages.errors import ActorGone, MailboxFull
from tests.actors.kernel.support import within


def letter(number: int) -> Envelope[int]:
    return Envelope(number, Reply())


async def test_a_full_mailbox_refuses_with_its_name_and_size() -> None:
    mailbox: Mailbox[int] = Mailbox("narrow", 2)
    mailbox.put_nowait(letter(1))
    mailbox.put_nowait(letter(2))
    with pytest.raises(MailboxFull) as full:
        mailbox.put_nowait(letter(3))
    assert (full.value.actor, full.value.size) == ("narrow", 2)
    assert (await mailbox.take()).message == 1
    mailbox.put_nowait(letter(4))
    assert [(await mailbox.take()).message for _ in range(2)] == [2, 4]


@within(5)
async def test_senders_that_wait_get_room_in_their_order_and_nobody_overtakes_them() -> None:
    mailbox: Mailbox[int] = Mailbox("narrow", 1)
    mailbox.put_nowait(letter(1))
    async with anyio.create_task_group() as senders:
        for number in (2, 3):
            senders.start_soon(mailbox.put, letter(number))
            await anyio.lowlevel.checkpoint()
        assert (await mailbox.take()).message == 1
        # The room went to sender 2, though its task has not run yet.
        with pytest.raises(MailboxFull):
            mailbox.put_nowait(letter(4))
        assert [(await mailbox.take()).message for _ in range(2)] == [2, 3]
    mailbox.put_nowait(letter(5))
    assert (await mailbox.take()).message == 5


@within(5)
async def test_a_cancelled_sender_leaves_no_message_and_no_hole() -> None:
    mailbox: Mailbox[int] = Mailbox("narrow", 1)
    mailbox.put_nowait(letter(1))
    with anyio.move_on_after(0.01) as scope:
        await mailbox.put(letter(2))
    assert scope.cancelled_caught
    async with anyio.create_task_group() as senders:
        senders.start_soon(mailbox.put, letter(3))
        await anyio.lowlevel.checkpoint()
        assert [(await mailbox.take()).message for _ in range(2)] == [1, 3]


@within(5)
async def test_closing_refuses_who_waits_and_hands_out_what_is_in() -> None:
    mailbox: Mailbox[int] = Mailbox("narrow", 1)
    mailbox.put_nowait(letter(1))
    errors: list[ActorGone] = []

    async def send() -> None:
        try:
            await mailbox.put(letter(2))
        except ActorGone as gone:
            errors.append(gone)

    async with anyio.create_task_group() as senders:
        senders.start_soon(send)
        await anyio.lowlevel.checkpoint()
        mailbox.close("it is stopping")
    assert [(gone.actor, gone.reason) for gone in errors] == [("narrow", "it is stopping")]
    with pytest.raises(ActorGone):
        mailbox.put_nowait(letter(3))
    assert (await mailbox.take()).message == 1
    with pytest.raises(EndOfMail):
        await mailbox.take()


async def test_what_comes_on_credit_takes_no_room_and_is_told_when_taken() -> None:
    mailbox: Mailbox[int] = Mailbox("narrow", 1)
    taken: list[int] = []
    for number in (1, 2):
        mailbox.deliver(Envelope(number, Reply(), lambda number=number: taken.append(number)))  # type: ignore[misc]
    mailbox.put_nowait(letter(3))
    with pytest.raises(MailboxFull):
        mailbox.put_nowait(letter(4))
    assert taken == []
    assert (await mailbox.take()).message == 1
    assert taken == [1]
    with pytest.raises(MailboxFull):  # taking a credited message makes no room for a local one
        mailbox.put_nowait(letter(4))
    assert [(await mailbox.take()).message for _ in range(2)] == [2, 3]
    assert taken == [1, 2]


async def test_drain_counts_the_tells_that_are_lost() -> None:
    mailbox: Mailbox[int] = Mailbox("narrow", 3)
    mailbox.put_nowait(letter(1))
    mailbox.put_nowait(letter(2))
    assert mailbox.drain("it failed") == 2
    with pytest.raises(ActorGone, match="it failed"):
        mailbox.put_nowait(letter(3))


@pytest.mark.parametrize("seed", range(10))
@within(10)
async def test_each_sender_in_order_none_lost_none_twice(seed: int) -> None:
    """8 senders of 50 messages each; some sends are cancelled at random, and then either arrive or do not."""
    chance = random.Random(seed)
    mailbox: Mailbox[int] = Mailbox("narrow", chance.randint(1, 8))
    sent: dict[int, list[int]] = {sender: [] for sender in range(8)}
    cancelled: set[int] = set()

    async def send(sender: int) -> None:
        for index in range(50):
            number = sender * 1000 + index
            if chance.random() < 0.2:
                with anyio.CancelScope() as scope:
                    if chance.random() < 0.5:
                        scope.cancel()
                    else:
                        scope.deadline = anyio.current_time() + 0.0005
                    await mailbox.put(letter(number))
                if scope.cancelled_caught:
                    cancelled.add(number)
                    continue
            elif chance.random() < 0.3:
                try:
                    mailbox.put_nowait(letter(number))
                except MailboxFull:
                    continue
            else:
                await mailbox.put(letter(number))
            sent[sender].append(number)

    received: list[int] = []

    async def receive() -> None:
        while True:
            try:
                received.append((await mailbox.take()).message)
            except EndOfMail:
                return
            if chance.random() < 0.3:
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as receiver:
        receiver.start_soon(receive)
        async with anyio.create_task_group() as senders:
            for sender in range(8):
                senders.start_soon(send, sender)
        mailbox.close("all sent")
    for sender in range(8):
        mine = [number for number in received if number // 1000 == sender]
        assert mine == sorted(set(mine))
        assert [number for number in mine if number not in cancelled] == sent[sender]
