"""Token ids of one answer, as they come, into text: a character is handed out when it is whole.

Invariant: the pieces of `push` and `flush`, put together, are `tokenizer.decode(all ids, skip_special_tokens=True)`.

A byte-level vocabulary (GPT-2, Llama 3, SmolLM2, Qwen) maps each token to bytes, so one table and one incremental
UTF-8 decoder are exact at O(1) per token. Any other decoder depends on neighbours: a short window of tokens is
decoded again for each new one. There, bytes that are no UTF-8 may be replaced one by one instead of as a run.
"""

from __future__ import annotations

import codecs
from typing import Protocol

import tokenizers
import tokenizers.decoders

REPLACEMENT = "\ufffd"
# Tokens held back while the text ends in half a character: no character of UTF-8 has more bytes.
MAX_HELD_TOKENS = 4


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""

    def flush(self) -> str:
        """At the end: what was held back, half a character as U+FFFD."""


class Vocabulary:
    """Shared by all answers: makes their detokenizers."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.byte_level = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content for token in added.values() if token.special}
        self._bytes: dict[int, bytes] = {}

    def detokenizer(self) -> Detokenizer:
        return ByteLevelDetokenizer(self) if self.byte_level else WindowDetokenizer(self)

    def has_text(self, token_id: int) -> bool:
        """Special and unknown tokens have none."""
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and token not in self._special

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """Of a byte-level vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._special:
            return b""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token is written as it is
            return token.encode()


class ByteLevelDetokenizer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """`_ids[:_read]` is context whose text, `_context`, is out already; the rest is held back."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._read = 0
        self._context = ""

    def push(self, token_id: int) -> str:
        if not self._vocabulary.has_text(token_id):
            return ""
        self._ids.append(token_id)
        text = self._vocabulary.decode(self._ids)
        held = len(self._ids) - self._read
        if text.endswith(REPLACEMENT) and held <= MAX_HELD_TOKENS:
            return ""
        return self._hand_out(text)

    def flush(self) -> str:
        return self._hand_out(self._vocabulary.decode(self._ids)) if self._read < len(self._ids) else ""

    def _hand_out(self, text: str) -> str:
        piece = text[len(self._context) :]
        if piece:
            # One piece of context is enough for a decoder to see that the next token does not begin the text.
            self._ids = self._ids[self._read :]
            self._context = self._vocabulary.decode(self._ids)
        self._read = len(self._ids)
        return piece


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
