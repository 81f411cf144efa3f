"""One request's outputs on their way from the AdmissionActor to the API handler of the same process.

Bounded: a reader that falls more than `limit` tokens behind is not waited for; `put` says so and the AdmissionActor
aborts the request. Outputs that wait are merged, so a slow reader gets fewer and larger chunks, never a loss.
"""

from __future__ import annotations

import msgspec

from actors.kernel.wakeup import Wakeup
from actors.messages.errors import RefusalReason, RequestRefused
from actors.messages.request import FinishReason, RequestOutput


class OutputStream:
    """Read with `async for`; ends after the output that carries `finish_reason`. One reader."""

    def __init__(self, request_id: str, limit: int) -> None:
        self.request_id = request_id
        self._limit = limit
        self._pending: RequestOutput | None = None
        self._ready = Wakeup()
        self._closing = False  # the finish is in; whatever comes later is not
        self._ended = False

    def put(self, output: RequestOutput) -> bool:
        """Hands over what a step did. False: the reader is more than `limit` tokens behind."""
        if self._closing:
            return True
        self._closing = output.finish_reason is not None
        pending = self._pending
        if pending is not None:
            output = msgspec.structs.replace(
                output,
                token_ids=pending.token_ids + output.token_ids,
                num_cached_tokens=max(pending.num_cached_tokens, output.num_cached_tokens),
            )
        self._pending = output
        self._ready.wake()
        return len(output.token_ids) <= self._limit

    def fail(self, reason: RefusalReason, text: str) -> None:
        """Ends the stream with an error; tokens that wait are still read first."""
        self.put(RequestOutput(self.request_id, finish_reason=FinishReason.ERROR, error=reason.value, error_text=text))

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Raises RequestRefused when it is an error without tokens before it."""
        if self._ended:
            raise StopAsyncIteration
        while self._pending is None:
            await self._ready.wait()
        output, self._pending = self._pending, None
        if output.error is not None and not output.token_ids:
            self._ended = True
            raise RequestRefused(RefusalReason(output.error), output.error_text or output.error)
        if output.error is not None:
            # The tokens first; the error with the next read.
            self._pending = msgspec.structs.replace(output, token_ids=())
            return msgspec.structs.replace(output, finish_reason=None, error=None, error_text=None, story=())
        self._ended = output.finish_reason is not None
        return output
