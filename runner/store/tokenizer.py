"""The byte-level BPE of a GGUF file as a tokenizer.json, the format of the `tokenizers` library.

A GGUF names its pre-tokenizer in `tokenizer.ggml.pre`; what each name means is written in llama.cpp's
`llama-vocab.cpp`.
"""

from __future__ import annotations

from typing import Any

from actors.messages.errors import ConfigurationError

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_PRE_TOKENIZERS = {
    "default": _byte_level(True),
    "gpt-2": _byte_level(True),
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, _byte_level(True)),
    "llama-bpe": _sequence(_split(_LLAMA3), _byte_level(False)),
    "qwen2": _sequence(_split(_QWEN2), _byte_level(False)),
}


def byte_level_tokenizer(
    *,
    source: str,
    tokens: list[str],
    token_types: list[int],
    merges: list[str],
    pre: str,
    bos_token_id: int | None,
) -> dict[str, Any]:
    """`bos_token_id`: put before every text that is encoded with special tokens; None: nothing is."""
    if pre not in _PRE_TOKENIZERS:
        raise ConfigurationError(
            f"{source} wants the pre-tokenizer {pre!r}; kvyard knows {', '.join(sorted(_PRE_TOKENIZERS))}. "
            "Give --model the model's Hugging Face folder with its tokenizer.json instead"
        )
    added = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for token_id, kind in enumerate(token_types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": _post_processor(tokens, bos_token_id),
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _post_processor(tokens: list[str], bos_token_id: int | None) -> dict[str, Any]:
    if bos_token_id is None:
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    bos = tokens[bos_token_id]
    single: list[dict[str, Any]] = [
        {"SpecialToken": {"id": bos, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_token_id], "tokens": [bos]}},
    }
