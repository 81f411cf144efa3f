"""The model's chat template, rendered as Hugging Face renders it (jinja2, sandboxed): messages in, prompt text out."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from api.errors import InvalidRequest


class ChatTemplate:
    """`special_tokens` are the names a template may write, such as bos_token; `now` answers its strftime_now."""

    def __init__(self, source: str, special_tokens: dict[str, str], now: Callable[[], datetime]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Raises InvalidRequest for what the template refuses."""
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Not jinja's own filter: that one escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
