"""One actor's run, from started() to stopped(): the loop over its mailbox, and what its end does to those who wait.

Invariant: however it ends (stopped in order, deadline passed, raised), its mailbox is closed, every open ask has been
answered or has failed with ActorGone, and `ended` is set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from actors.kernel.actor import Actor
from actors.kernel.mailbox import EndOfMail, Envelope
from actors.messages.supervision import Ping, Pong

logger = logging.getLogger(__name__)


class Life:
    def __init__(self, actor: Actor[Any], forgivable: Callable[[Life, BaseException], bool]) -> None:
        """`forgivable` says of an error whether it is only the echo of an orderly stop."""
        self.actor = actor
        self.handled = 0  # messages, pings left out
        self.error: BaseException | None = None
        self.began = anyio.Event()  # started() has returned, or the life has ended
        self.ended = anyio.Event()
        # Whatever cancels the system's surroundings is kept away: the system stops its actors in order.
        self.scope = anyio.CancelScope(shield=True)
        self._forgivable = forgivable

    async def run(self) -> None:
        """Never raises what the actor raised: that is in `error` afterwards."""
        try:
            with self.scope:
                await self._live()
        except Exception as raised:
            error = first_error(raised)
            if not self._forgivable(self, error):
                self.error = error
        finally:
            await self._end()

    async def _live(self) -> None:
        async with anyio.create_task_group() as tasks:
            self.actor.tasks = tasks
            await self.actor.started()
            self.began.set()
            await self._handle_messages()
            tasks.cancel_scope.cancel()

    async def _handle_messages(self) -> None:
        mailbox, size = self.actor.mailbox, self.actor.mailbox_size
        while True:
            before = self.handled
            try:
                await self._handle(await mailbox.take())
            except EndOfMail:
                return
            while self.handled - before < size:
                envelope = mailbox.take_nowait()
                if envelope is None:
                    break
                await self._handle(envelope)
                del envelope  # so that an unanswered reply is seen as soon as it is garbage
            if self.handled > before:
                await self.actor.settled()
            if len(mailbox):
                await anyio.lowlevel.checkpoint()

    async def _handle(self, envelope: Envelope[Any]) -> None:
        if type(envelope.message) is Ping:
            envelope.reply.send(Pong(self.handled))
            return
        self.handled += 1
        await self.actor.receive(envelope.message, envelope.reply)

    async def _end(self) -> None:
        actor, mailbox = self.actor, self.actor.mailbox
        if self.error is None:
            mailbox.close("it was stopped")
        else:
            text = f"it failed: {type(self.error).__name__}: {self.error}"
            lost = mailbox.drain(text)
            logger.error("actor_failed actor=%s messages_lost=%d", actor.name, lost, exc_info=self.error)
        with anyio.move_on_after(actor.stop_seconds, shield=True) as deadline:
            try:
                await actor.stopped()
            except Exception as raised:
                logger.exception("actor_clean_up_failed actor=%s", actor.name)
                self.error = self.error or first_error(raised)
        if deadline.cancelled_caught:
            logger.error("actor_clean_up_timed_out actor=%s seconds=%g", actor.name, actor.stop_seconds)
        if lost := mailbox.drain("it was stopped"):
            logger.warning("actor_messages_lost actor=%s messages=%d", actor.name, lost)
        self.began.set()
        self.ended.set()


def first_error(error: BaseException) -> BaseException:
    """The first error that is no group: what a person wants to read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
