"""Pieces put together are the tokenizer's own decoding of the whole; a character comes when it is whole."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from api.openai.detokenizer import ByteLevelDetokenizer, Detokenizer, Vocabulary, WindowDetokenizer

REAL_TEXT = (
    "The capital of France is Paris. Die Straße führt nach München – naïve façade, ¿qué? "
    "東京は日本の首都です。 Привет, мир! שלום עולם. नमस्ते दुनिया 🙂👩‍👩‍👧‍👦🇫🇷 \n\n\t def f(x):\n    return x ** 2\x00\r\n"
)


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


@pytest.fixture(scope="module")
def vocabulary(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


def test_real_text(vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer) -> None:
    token_ids = tokenizer.encode(REAL_TEXT).ids
    detokenizer = vocabulary.detokenizer()
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    found = pieces(detokenizer, token_ids)
    assert "".join(found) == REAL_TEXT
    assert "\ufffd" not in "".join(found)
    assert found[-1] == ""


def test_a_character_of_several_tokens_comes_with_its_last(
    vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer
) -> None:
    # U+13000, an Egyptian hieroglyph: rare enough that its four UTF-8 bytes are several tokens.
    token_ids = tokenizer.encode("\U00013000").ids
    assert len(token_ids) >= 3
    assert pieces(vocabulary.detokenizer(), token_ids) == [""] * (len(token_ids) - 1) + ["\U00013000", ""]
    # Cut short, its rest is one replacement character, at the end.
    assert pieces(vocabulary.detokenizer(), token_ids[:-1]) == [""] * (len(token_ids) - 1) + ["\ufffd"]


def test_special_tokens_and_unknown_ids_are_no_text(vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer) -> None:
    (hello,) = tokenizer.encode("Hello").ids
    assert pieces(vocabulary.detokenizer(), [1, hello, 2, 0, 60_000]) == ["", "Hello", "", "", "", ""]


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, 49_200), max_size=40))
def test_random_ids(vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer, token_ids: list[int]) -> None:
    assert "".join(pieces(vocabulary.detokenizer(), token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_bytes(vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer, data: st.DataObject) -> None:
    """Tokens of one byte each, in any order: mostly no UTF-8 at all."""
    one_byte = [token_id for token_id in range(49_152) if len(vocabulary.token_bytes(token_id)) == 1]
    token_ids = data.draw(st.lists(st.sampled_from(one_byte), max_size=30))
    assert "".join(pieces(vocabulary.detokenizer(), token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_random_text(vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text).ids
    expected = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces(vocabulary.detokenizer(), token_ids)) == expected


@pytest.fixture(scope="module")
def sentencepiece_like() -> tokenizers.Tokenizer:
    """As Llama 2 and Gemma decode: words begin with ▁, characters outside the vocabulary are bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "é"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_decoder_that_is_not_byte_level(sentencepiece_like: tokenizers.Tokenizer, data: st.DataObject) -> None:
    vocabulary = Vocabulary(sentencepiece_like)
    detokenizer = vocabulary.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    words = [["▁"], ["▁the"], ["▁cat"], ["s"], ["é"], ["<s>"], ["</s>"]]
    characters = [[f"<0x{byte:02X}>" for byte in character.encode()] for character in "東🙂ñ"]
    drawn = data.draw(st.lists(st.sampled_from(words + characters), max_size=30))
    token_ids = [sentencepiece_like.token_to_id(token) for tokens in drawn for token in tokens]
    found = pieces(detokenizer, token_ids)
    assert "".join(found) == sentencepiece_like.decode(token_ids, skip_special_tokens=True)
    assert "\ufffd" not in "".join(found)


def test_the_window_stays_small(sentencepiece_like: tokenizers.Tokenizer) -> None:
    """O(1) per token: what is decoded again does not grow with the answer."""
    vocabulary = Vocabulary(sentencepiece_like)
    longest = 0
    decode = vocabulary.decode

    def measured(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    vocabulary.decode = measured  # type: ignore[method-assign]
    detokenizer = vocabulary.detokenizer()
    cycle = [
        sentencepiece_like.token_to_id(token) for token in ("▁cat", "</s>", "<0xFF>", "<0xE6>", "<0x9D>", "<0xB1>")
    ]
    for token_id in cycle * 100:
        detokenizer.push(token_id)
    for _ in range(100):
        detokenizer.push(sentencepiece_like.token_to_id("<0xFF>"))
    assert longest <= 12
