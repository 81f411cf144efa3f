"""Chat messages: what a client may send, and the role and text that the chat template sees."""

from __future__ import annotations

from typing import Any

from api.errors import InvalidRequest
from api.openai.fields import is_neutral

ROLES = ("system", "developer", "user", "assistant", "tool")

# What clients send back of our own answers, and who said it; templates of text models read none of it.
IGNORED = ("name", "tool_call_id")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
}


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """`[{role, content}]` for the template. Raises InvalidRequest that names the message and field."""
    if not messages:
        raise InvalidRequest("'messages' is empty", "messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: dict[str, Any], path: str) -> dict[str, str]:
    if "role" not in message:
        raise InvalidRequest(f"'{path}.role' is required", f"{path}.role", "missing_required_parameter")
    role = message["role"]
    if role not in ROLES:
        raise InvalidRequest(f"'{path}.role': {role!r} is none of {', '.join(ROLES)}", f"{path}.role")
    for name, value in message.items():
        if name in ("role", "content") or name in IGNORED:
            continue
        where = f"{path}.{name}"
        if name not in NEUTRAL:
            raise InvalidRequest(f"unknown field {where!r}", where, "unknown_parameter")
        if not is_neutral(value, NEUTRAL[name]):
            raise InvalidRequest(f"{where!r} is not supported yet", where, "unsupported_parameter")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    # Templates know no developer: it is the newer word for system.
    return {"role": "system" if role == "developer" else role, "content": _text(content, f"{path}.content")}


def _text(content: Any, path: str) -> str:
    """A string, or the texts of a list of text parts put together with nothing between them."""
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"{path!r} is required", path, "missing_required_parameter")
    if not isinstance(content, list):
        raise InvalidRequest(f"{path!r} must be a string or a list of text parts", path, "invalid_type")
    return "".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path!r} must be an object", path, "invalid_type")
    if part.get("type") != "text":
        raise InvalidRequest(
            f"'{path}.type': {part.get('type')!r} is not supported, only 'text' is", f"{path}.type", "unsupported_value"
        )
    for name in part:
        if name not in ("type", "text"):
            raise InvalidRequest(f"unknown field '{path}.{name}'", f"{path}.{name}", "unknown_parameter")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"'{path}.text' must be a string", f"{path}.text", "invalid_type")
    return str(part["text"])
