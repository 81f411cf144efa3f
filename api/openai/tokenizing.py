"""Text and conversations into token ids, with the model's own tokenizer and chat template.

The tokenizer is the file that Hugging Face made, run by `tokenizers`; long texts are tokenised on a thread, so that
one long prompt does not hold up the streams of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import tokenizers

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from api.errors import InvalidRequest
from api.openai.chat_template import ChatTemplate
from api.openai.detokenizer import Detokenizer, Vocabulary

LONG_TEXT = 4096  # characters; a shorter one takes less time than the way to a thread and back
MAX_THREADS = 4

T = TypeVar("T")


class TextTooLong(Exception):
    """It has at least `least_tokens` tokens, more than the limit; it was not tokenised to find out how many."""

    def __init__(self, least_tokens: int) -> None:
        self.least_tokens = least_tokens
        super().__init__(f"at least {least_tokens} tokens")


class Tokenizer:
    """Raises ConfigurationError when the model's folder has no readable tokenizer."""

    def __init__(self, description: ModelDescription, now: Callable[[], datetime]) -> None:
        folder = Path(description.folder)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ConfigurationError(f"cannot read the tokenizer {folder / 'tokenizer.json'}: {error}") from error
        self.vocab_size = description.vocab_size
        self._vocabulary = Vocabulary(self._tokenizer)
        self._template = self._load_template(folder / "chat_template.jinja", description, now)
        self._longest_token = self._length_of_longest_token()
        self._threads = anyio.CapacityLimiter(MAX_THREADS)

    def detokenizer(self) -> Detokenizer:
        return self._vocabulary.detokenizer()

    async def encode_prompt(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None
    ) -> tuple[int, ...]:
        """May raise TextTooLong instead of finding out by how many tokens a text is beyond `limit`."""
        return await self._run(len(text), lambda: self._encode(text, add_special_tokens, limit))

    async def encode_messages(
        self,
        messages: list[dict[str, str]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        limit: int | None = None,
    ) -> tuple[int, ...]:
        """Special tokens in the rendered text are special; none is added, for the template writes its own."""
        template = self._template
        if template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")

        def work() -> tuple[int, ...]:
            text = template.render(messages, add_generation_prompt=add_generation_prompt)
            return self._encode(text, add_special_tokens, limit)

        return await self._run(sum(len(message["content"]) for message in messages), work)

    def _encode(self, text: str, add_special_tokens: bool, limit: int | None) -> tuple[int, ...]:
        if limit is not None and self._longest_token is not None and len(text) > limit * self._longest_token:
            raise TextTooLong(math.ceil(len(text) / self._longest_token))
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    async def _run(self, length: int, work: Callable[[], T]) -> T:
        if length <= LONG_TEXT:
            return work()
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)

    def _length_of_longest_token(self) -> int | None:
        """Characters; None where a token may stand for any number of them. A byte-level token has as many letters as
        its text has bytes, so no fewer than it has characters."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        swallows = any(token.lstrip or token.rstrip for token in added)
        if self._tokenizer.normalizer is not None or swallows or not self._vocabulary.byte_level:
            return None
        return max(map(len, self._tokenizer.get_vocab()))

    def _load_template(
        self, path: Path, description: ModelDescription, now: Callable[[], datetime]
    ) -> ChatTemplate | None:
        if not path.exists():
            return None
        ids = {"bos_token": description.bos_token_id, "eos_token": next(iter(description.eos_token_ids), None)}
        names = {name: self._tokenizer.id_to_token(token_id) for name, token_id in ids.items() if token_id is not None}
        special_tokens = {name: token for name, token in names.items() if token is not None}
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens, now)
        except Exception as error:
            raise ConfigurationError(f"cannot read the chat template {path}: {error}") from error
