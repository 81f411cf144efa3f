"""The supported fields of each route's body, their types and ranges; from bytes to a checked Struct.

`fields.py` says which other fields are let pass. Types are strict: true is no number, 1.0 no integer, "1" neither.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from api.deadlines import Timeout
from api.errors import InvalidRequest
from api.openai.fields import CHAT_FIELDS, COMPLETIONS_FIELDS, supported_part

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
PositiveInt = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; never sent, which is allowed


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    timeout: Timeout | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]


class CompletionsBody(GenerationBody, frozen=True, kw_only=True):
    prompt: str | list[Any]


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # default: for a prompt true, for messages false
    add_generation_prompt: bool | None = None  # for messages; default true


Body = TypeVar("Body", bound=msgspec.Struct)


def chat_body(fields: dict[str, Any]) -> ChatBody:
    return convert(supported_part(fields, CHAT_FIELDS), ChatBody)


def completions_body(fields: dict[str, Any]) -> CompletionsBody:
    return convert(supported_part(fields, COMPLETIONS_FIELDS), CompletionsBody)


def tokenize_body(fields: dict[str, Any]) -> TokenizeBody:
    body = convert(fields, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either 'prompt' or 'messages'", "prompt", "missing_required_parameter")
    return body


def json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise InvalidRequest("the body is nested too deep", None, "invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not JSON in UTF-8: {error}", None, "invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object", None, "invalid_json")
    return body


_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"^Object missing required field `(.*)`")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`")


def convert(part: dict[str, Any], body_type: type[Body]) -> Body:
    """Raises InvalidRequest that names the field by its path, such as `stop[1]`."""
    try:
        return msgspec.convert(part, body_type)
    except msgspec.ValidationError as error:
        text = str(error)
    at = _PATH.search(text)
    path, text = (at[1], text[: at.start()]) if at else ("", text)
    for pattern, words, code in (
        (_MISSING, "is required", "missing_required_parameter"),
        (_UNKNOWN, "is unknown", "unknown_parameter"),
    ):
        if named := pattern.match(text):
            path = f"{path}.{named[1]}" if path else named[1]
            raise InvalidRequest(f"{path!r} {words}", path, code)
    raise InvalidRequest(f"{path!r}: {text}", path, "invalid_type" if ", got " in text else "invalid_value")
