"""Every body field that the endpoint knows, once. docs/api.md shows this table, and a test compares the two.

A field is SUPPORTED (it does what it says), NEUTRAL (not supported yet: accepted with a value that asks for nothing,
refused by name with any other) or IGNORED (harmless, sent by habit). Any field that is not here is refused by name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from api.errors import InvalidRequest


class Support(StrEnum):
    SUPPORTED = "supported"
    NEUTRAL = "accepted when neutral"
    IGNORED = "accepted and ignored"


class Field(msgspec.Struct, frozen=True):
    name: str
    support: Support
    note: str = ""  # what it does, or why ignoring it is harmless
    neutral: tuple[Any, ...] = ()  # beside null
    chat: bool = True
    completions: bool = True


def _supported(name: str, note: str, *, chat: bool = True, completions: bool = True) -> Field:
    return Field(name, Support.SUPPORTED, note, chat=chat, completions=completions)


def _neutral(name: str, *values: Any, chat: bool = True, completions: bool = True) -> Field:
    return Field(name, Support.NEUTRAL, neutral=values, chat=chat, completions=completions)


def _ignored(name: str, note: str) -> Field:
    return Field(name, Support.IGNORED, note)


_NO_REASONING = "about the text of reasoning models; there are none yet"

FIELDS: tuple[Field, ...] = (
    _supported("model", "required; the id of `/v1/models`"),
    _supported("messages", "required; roles system, developer, user, assistant, tool; text only", completions=False),
    _supported("prompt", "required; text or token ids, or a list of one of them", chat=False),
    _supported("stream", "server-sent events"),
    _supported("stream_options", "`include_usage`, `continuous_usage_stats`"),
    _supported("max_tokens", "1 or more; default: chat the rest of the context, completions 16"),
    _supported("max_completion_tokens", "the same; it wins over `max_tokens`"),
    _supported("temperature", "0 to 2, default 1; 0 is greedy"),
    _supported("top_p", "above 0 to 1, default 1"),
    _supported("top_k", "-1 or more; -1 and 0 are off"),
    _supported("seed", "a signed 64-bit integer; the same seed draws the same tokens"),
    _supported("stop", "a string or up to 16, of 1 to 1,024 characters each"),
    _supported("min_tokens", "0 or more, at most `max_tokens`; before it neither the model nor `stop` ends the text"),
    _supported("ignore_eos", "go on after the model's end-of-text token"),
    _supported("timeout", "seconds; also the header X-Request-Timeout, the smaller wins; default 600"),
    _supported("priority", "lower is sooner; only 0 unless the engine runs with `--policy priority`"),
    _supported("n", "1"),
    _supported("kv_transfer_params", "between router and engines; refused from clients"),
    # OpenAI's, each waiting for its issue.
    _neutral("frequency_penalty", 0),
    _neutral("presence_penalty", 0),
    _neutral("logit_bias", {}),
    _neutral("logprobs", False),
    _neutral("top_logprobs", 0, completions=False),
    _neutral("best_of", 1, chat=False),
    _neutral("suffix", "", chat=False),
    _neutral("echo", False),
    _neutral("tools", [], completions=False),
    _neutral("tool_choice", "none", "auto", completions=False),
    _neutral("functions", [], completions=False),
    _neutral("function_call", "none", "auto", completions=False),
    _neutral("response_format", {"type": "text"}),
    _neutral("reasoning_effort", "none", "medium", completions=False),
    _neutral("verbosity", "medium", completions=False),
    _neutral("modalities", ["text"], completions=False),
    _neutral("audio", completions=False),
    _neutral("prediction", completions=False),
    _neutral("web_search_options", completions=False),
    # Of vLLM, SGLang and their routers.
    _neutral("repetition_penalty", 1),
    _neutral("min_p", 0),
    _neutral("length_penalty", 1),
    _neutral("use_beam_search", False),
    _neutral("stop_token_ids", []),
    _neutral("stop_regex", []),
    _neutral("bad_words", []),
    _neutral("allowed_token_ids"),
    _neutral("include_stop_str_in_output", False),
    _neutral("no_stop_trim", False),
    _neutral("skip_special_tokens", True),
    _neutral("spaces_between_special_tokens", True),
    _neutral("add_special_tokens", True, chat=False),
    _neutral("add_special_tokens", False, completions=False),
    _neutral("add_generation_prompt", True, completions=False),
    _neutral("continue_final_message", False),
    _neutral("chat_template", completions=False),
    _neutral("chat_template_kwargs", {}, completions=False),
    _neutral("documents", [], completions=False),
    _neutral("truncate_prompt_tokens"),
    _neutral("prompt_logprobs"),
    _neutral("return_hidden_states", False),
    _neutral("return_token_ids", False),
    _neutral("return_tokens_as_token_ids", False),
    _neutral("regex"),
    _neutral("ebnf"),
    _neutral("json_schema"),
    _neutral("guided_json"),
    _neutral("guided_regex"),
    _neutral("guided_choice"),
    _neutral("guided_grammar"),
    _neutral("structured_outputs"),
    _neutral("logits_processors", []),
    _neutral("custom_logit_processor"),
    _neutral("mm_processor_kwargs", {}),
    _neutral("lora_path"),
    _neutral("session_params"),
    _neutral("cache_salt"),
    _neutral("rid"),
    _neutral("request_id"),
    _neutral("bootstrap_host"),
    _neutral("bootstrap_port"),
    _neutral("bootstrap_room"),
    _ignored("user", "who asks; nothing depends on it"),
    _ignored("safety_identifier", "who asks; nothing depends on it"),
    _ignored("store", "nothing is ever stored"),
    _ignored("metadata", "labels for what `store` keeps"),
    _ignored("service_tier", "there is one tier"),
    _ignored("prompt_cache_key", "a hint for routing; prefixes are found without it"),
    _ignored("prompt_cache_retention", "a hint; the prefix cache keeps what it can"),
    _ignored("parallel_tool_calls", "without `tools` it means nothing, and `tools` are refused"),
    _ignored("separate_reasoning", _NO_REASONING),
    _ignored("stream_reasoning", _NO_REASONING),
    _ignored("include_reasoning", _NO_REASONING),
)

CHAT_FIELDS = {field.name: field for field in FIELDS if field.chat}
COMPLETIONS_FIELDS = {field.name: field for field in FIELDS if field.completions}


def supported_part(body: dict[str, Any], known: dict[str, Field]) -> dict[str, Any]:
    """The fields of `body` that do something. Raises InvalidRequest for the first one that is refused."""
    part: dict[str, Any] = {}
    for name, value in body.items():
        field = known.get(name)
        if field is None:
            raise InvalidRequest(f"unknown field {name!r}", name, "unknown_parameter")
        if field.support is Support.SUPPORTED:
            part[name] = value
        elif field.support is Support.NEUTRAL and not is_neutral(value, field.neutral):
            accepted = ", ".join(msgspec.json.encode(choice).decode() for choice in (None, *field.neutral))
            raise InvalidRequest(
                f"{name!r} is not supported yet: leave it out, or send {accepted}", name, "unsupported_parameter"
            )
    return part


def is_neutral(value: Any, choices: tuple[Any, ...]) -> bool:
    """JSON equality: 1 and 1.0 are the same number, true is none."""
    return value is None or any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices
    )
