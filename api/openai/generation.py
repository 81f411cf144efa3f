"""One request's life between the endpoint and the engine: submit, read, abort, close.

Owns the order of these messages. Invariants: a request that the AdmissionActor may have accepted gets exactly one
ResponseClosed, on every way out; and an AbortRequest before it unless its stream has ended. Times to the tokens are
measured here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec

from actors.messages.admission import AbortRequest, ResponseClosed, SubmitRequest
from actors.messages.errors import ActorGone, AskTimeout, RefusalReason, RequestRefused
from actors.messages.lease import Ticket
from actors.messages.request import FinishReason, RequestOutput
from actors.output_stream import OutputStream
from api.deadlines import deadline_exceeded
from api.engine_handle import EngineHandle
from api.openai.detokenizer import Detokenizer
from api.openai.preparation import Prepared
from api.openai.responses import Usage
from api.openai.stop_strings import StopStrings

CLOSING_SECONDS = 5.0  # for the last messages of a request whose handler is being cancelled


class Piece(msgspec.Struct, frozen=True):
    """What one output added to the answer. `finish_reason` is in the last one."""

    text: str
    finish_reason: str | None = None
    ticket: Ticket | None = None


class Generation:
    """The answer as text: an async iterator of `Piece`. `usage` counts what has been read."""

    def __init__(
        self, engine: EngineHandle, prepared: Prepared, stream: OutputStream, detokenizer: Detokenizer
    ) -> None:
        self._engine, self._prepared, self._stream, self._detokenizer = engine, prepared, stream, detokenizer
        self._stop = StopStrings(prepared.stop)
        self._num_tokens = self._num_cached_tokens = 0
        self._last_token_at: float | None = None
        self._ended = False
        # How the request is closed if nothing else is said until then.
        self.outcome = "abort"
        self.abort_reason: str | None = "the client is gone"  # None: the engine has ended the request itself

    @property
    def usage(self) -> Usage:
        kept = 0 if self._prepared.request.do_remote_decode else self._num_tokens
        return Usage.of(len(self._prepared.request.prompt_token_ids), kept, self._num_cached_tokens)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Piece:
        """Raises RequestRefused when the engine ends the request with an error."""
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await anext(self._stream)
        except RequestRefused:
            self._ended, self.abort_reason, self.outcome = True, None, "error"
            raise
        if output.finish_reason is FinishReason.ABORT:
            self._ended, self.abort_reason, self.outcome = True, None, "abort"
            raise RequestRefused(
                RefusalReason.ABORTED, "an operator paused the engine and ended this request; send it again"
            )
        if output.finish_reason is not None:
            self.abort_reason = None
        self._measure(len(output.token_ids))
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        text = self._text(output)
        if self._stop.stopped:
            self._end("stop", "stop string")
        elif output.finish_reason is not None:
            self._end(output.finish_reason.value, None)
        return Piece(text, self.outcome if self._ended else None, output.ticket)

    def give_up(self, reason: str) -> None:
        """The endpoint ends the request with an error of its own."""
        if not self._ended:
            self._end("error", reason)

    def _end(self, outcome: str, abort_reason: str | None) -> None:
        self._ended, self.outcome = True, outcome
        if self.abort_reason is not None:
            self.abort_reason = abort_reason

    def _text(self, output: RequestOutput) -> str:
        # The token that ended the text is counted, but is no text, special or not.
        ends = output.finish_reason is FinishReason.STOP and output.stop_token_id is not None
        texts = []
        for index, token_id in enumerate(output.token_ids, start=1):
            self._num_tokens += 1
            if ends and index == len(output.token_ids):
                break
            texts.append(self._visible(self._detokenizer.push(token_id)))
            if self._stop.stopped:
                return "".join(texts)
        if output.finish_reason is not None:
            texts.append(self._visible(self._detokenizer.flush()))
            texts.append(self._stop.flush())
        return "".join(texts)

    def _visible(self, text: str) -> str:
        # The text of the first min_tokens tokens is exempt: a stop string has to begin behind it.
        return text if self._num_tokens <= self._prepared.request.min_tokens else self._stop.push(text)

    def _measure(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now, metrics = self._engine.clock(), self._engine.metrics
        if self._last_token_at is None:
            metrics.first_token(now - self._prepared.request.arrival)
            num_tokens -= 1
            self._last_token_at = now
        if num_tokens:
            metrics.tokens_followed(now - self._last_token_at, num_tokens)
        self._last_token_at = now


@asynccontextmanager
async def submitted(
    engine: EngineHandle, prepared: Prepared, detokenizer: Detokenizer, trace_id: str
) -> AsyncIterator[Generation]:
    """Submits the request; at the end of the block it is finished or aborted, and closed.

    The block ends when the last byte of the answer is out. Raises RequestRefused and the kernel's errors.
    """
    request = prepared.request
    generation: Generation | None = None
    accepted = True  # as long as it is not known that it was not
    unanswered = ("the client is gone", "abort")  # why, and how, it ends if the ask never returns
    try:
        try:
            seconds = max(0.0, request.deadline - engine.clock())
            stream = await engine.admission.ask(SubmitRequest(request, trace_id), seconds)
        except (RequestRefused, ActorGone):
            accepted = False
            raise
        except AskTimeout as error:
            unanswered = ("deadline", "error")
            raise deadline_exceeded() from error
        generation = Generation(engine, prepared, stream, detokenizer)
        yield generation
    except Exception as error:
        if generation is not None:
            generation.give_up(f"the endpoint failed: {type(error).__name__}")
        raise
    finally:
        if accepted:
            await _close(engine, request.request_id, generation, unanswered)
        engine.metrics.request_ended(
            "refused" if not accepted else "error" if generation is None else generation.outcome
        )


async def _close(
    engine: EngineHandle, request_id: str, generation: Generation | None, unanswered: tuple[str, str]
) -> None:
    """Without a generation the ask went unanswered: the request may be there or not; unknown ids are ignored."""
    abort_reason, outcome = unanswered if generation is None else (generation.abort_reason, generation.outcome)
    with anyio.move_on_after(CLOSING_SECONDS, shield=True), suppress(ActorGone):
        if abort_reason is not None:
            await engine.admission.tell(AbortRequest(request_id, abort_reason))
        await engine.admission.tell(ResponseClosed(request_id, outcome))
