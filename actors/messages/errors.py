"""Typed errors: what can go wrong for a request or between actors, with the data a caller needs to react.

An error that crosses a socket is one of the Structs of `ErrorMessage` below; `raise_error` turns it back into its
exception, so `except ActorGone` works the same for a local and a remote actor.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class KvyardError(Exception):
    """Base of every error that kvyard raises on purpose. Its text tells a person what to do next."""


class ActorGone(KvyardError):
    """The actor behind an address has ended, or the socket to it is lost."""

    def __init__(self, actor: str, reason: str = "it has ended") -> None:
        self.actor, self.reason = actor, reason
        super().__init__(f"actor {actor!r} is gone: {reason}")


class MailboxFull(KvyardError):
    """A message that may not wait found no room."""

    def __init__(self, actor: str, size: int) -> None:
        self.actor, self.size = actor, size
        super().__init__(f"the mailbox of actor {actor!r} is full ({size} messages)")


class AskTimeout(KvyardError):
    """No answer within the asker's time."""

    def __init__(self, actor: str, message: str, seconds: float) -> None:
        self.actor, self.message, self.seconds = actor, message, seconds
        super().__init__(f"actor {actor!r} has not answered {message} within {seconds:g} s")


class ActorFailed(KvyardError):
    """The actor refused this one message with an error that is not one of the types here."""

    def __init__(self, actor: str, reason: str) -> None:
        self.actor, self.reason = actor, reason
        super().__init__(f"actor {actor!r} could not serve the message: {reason}")


class ConfigurationError(KvyardError):
    """A flag, file or environment variable that the process cannot start with."""


class RefusalReason(StrEnum):
    """Why a request ended without an answer. `http_status` says how the API reports it."""

    INVALID_REQUEST = "invalid_request"  # 400: a field is wrong; `param` names it
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # 400: prompt + max_tokens > context
    EXCEEDS_KV_CAPACITY = "exceeds_kv_capacity"  # 400: can never fit the KV pool
    QUEUE_FULL = "queue_full"  # 429, with Retry-After
    DEADLINE_EXCEEDED = "deadline_exceeded"  # 504
    ENGINE_UNAVAILABLE = "engine_unavailable"  # 503: an actor or worker died, or the engine drains
    KV_LOAD_FAILED = "kv_load_failed"  # 502: policy "fail" and the prompt's KV blocks did not arrive
    KV_SEND_FAILED = "kv_send_failed"  # 503: a prefill engine cannot lease the blocks
    SLOW_READER = "slow_reader"  # the client reads slower than the engine writes, beyond the stream's bound
    ABORTED = "aborted"  # 503: an operator has paused the engine and ended what it had
    INTERNAL = "internal_error"  # 500

    @property
    def http_status(self) -> int:
        return _HTTP_STATUS[self]


_HTTP_STATUS = {
    RefusalReason.INVALID_REQUEST: 400,
    RefusalReason.CONTEXT_LENGTH_EXCEEDED: 400,
    RefusalReason.EXCEEDS_KV_CAPACITY: 400,
    RefusalReason.QUEUE_FULL: 429,
    RefusalReason.DEADLINE_EXCEEDED: 504,
    RefusalReason.ENGINE_UNAVAILABLE: 503,
    RefusalReason.KV_LOAD_FAILED: 502,
    RefusalReason.KV_SEND_FAILED: 503,
    RefusalReason.SLOW_READER: 503,
    RefusalReason.ABORTED: 503,
    RefusalReason.INTERNAL: 500,
}


class RequestRefused(KvyardError):
    """A request is refused, or ends with an error, for a reason that its client can read.

    `param` is the name of the request field at fault; `retry_after` is seconds.
    """

    def __init__(
        self, reason: RefusalReason, text: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        self.reason, self.text, self.param, self.retry_after = reason, text, param, retry_after
        super().__init__(text)


class ErrorMessage(msgspec.Struct, frozen=True, tag=True):
    """An error on its way through a socket: the class name and its constructor's values."""

    kind: str
    values: dict[str, str | float | None]

    @classmethod
    def of(cls, actor: str, error: BaseException) -> ErrorMessage:
        match error:
            case ActorGone():
                return cls("ActorGone", {"actor": error.actor, "reason": error.reason})
            case RequestRefused():
                return cls(
                    "RequestRefused",
                    {
                        "reason": error.reason.value,
                        "text": error.text,
                        "param": error.param,
                        "retry_after": error.retry_after,
                    },
                )
            case ActorFailed():
                return cls("ActorFailed", {"actor": error.actor, "reason": error.reason})
            case _:
                return cls("ActorFailed", {"actor": actor, "reason": f"{type(error).__name__}: {error}"})

    def exception(self) -> KvyardError:
        values = self.values
        match self.kind:
            case "ActorGone":
                return ActorGone(str(values["actor"]), str(values["reason"]))
            case "RequestRefused":
                retry_after = values["retry_after"]
                return RequestRefused(
                    RefusalReason(str(values["reason"])),
                    str(values["text"]),
                    param=None if values["param"] is None else str(values["param"]),
                    retry_after=None if retry_after is None else float(retry_after),
                )
            case _:
                return ActorFailed(str(values["actor"]), str(values["reason"]))
