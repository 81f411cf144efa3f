"""The objects that go out, as OpenAI defines them, encoded by msgspec. `usage` left UNSET does not appear at all."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        return cls(
            prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
        )


class Message(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    message: Message
    finish_reason: str
    index: int = 0
    logprobs: None = None


class TextChoice(msgspec.Struct, frozen=True):
    """Of a whole completion and, with `finish_reason` None, of its chunks."""

    text: str
    finish_reason: str | None
    index: int = 0
    logprobs: None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None


Choice = ChatChoice | TextChoice | ChunkChoice


class Answer(msgspec.Struct, frozen=True):
    """A completion, or one chunk of it; `object` says which."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str
    choices: tuple[Choice, ...]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class Shape(msgspec.Struct, frozen=True):
    """What all objects of one answer share, and what makes a chat differ from a completion."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    chat: bool

    def whole(self, text: str, finish_reason: str, usage: Usage, params: dict[str, Any] | UnsetType = UNSET) -> Answer:
        choice = ChatChoice(Message(text), finish_reason) if self.chat else TextChoice(text, finish_reason)
        return self._answer("chat.completion" if self.chat else "text_completion", (choice,), usage, params)

    def opening(self, usage: Usage | UnsetType | None) -> Answer:
        """A chat's first chunk: it names the role and has no text."""
        return self._chunk((ChunkChoice(Delta(role="assistant", content="")),), usage)

    def text_chunk(self, text: str, usage: Usage | UnsetType | None) -> Answer:
        return self._chunk((ChunkChoice(Delta(content=text)) if self.chat else TextChoice(text, None),), usage)

    def closing(self, finish_reason: str, usage: Usage | UnsetType | None) -> Answer:
        choice = ChunkChoice(Delta(), finish_reason) if self.chat else TextChoice("", finish_reason)
        return self._chunk((choice,), usage)

    def usage_chunk(self, usage: Usage) -> Answer:
        return self._chunk((), usage)

    def _chunk(self, choices: tuple[Choice, ...], usage: Usage | UnsetType | None) -> Answer:
        return self._answer("chat.completion.chunk" if self.chat else "text_completion", choices, usage, UNSET)

    def _answer(
        self,
        kind: str,
        choices: tuple[Choice, ...],
        usage: Usage | UnsetType | None,
        params: dict[str, Any] | UnsetType,
    ) -> Answer:
        return Answer(self.id, kind, self.created, self.model, self.system_fingerprint, choices, usage, params)
