"""docs/api.md says what the code does: its table of fields is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from actors.messages.errors import RefusalReason
from actors.messages.model import ModelDescription
from api.openai.bodies import ChatBody, CompletionsBody
from api.openai.fields import CHAT_FIELDS, COMPLETIONS_FIELDS, FIELDS, Field, Support
from tests.api.openai.scripted import serving

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its own first two lines."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def row(field: Field) -> list[str]:
    routes = "both" if field.chat and field.completions else "chat" if field.chat else "completions"
    values = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in (None, *field.neutral))
    return [f"`{field.name}`", routes, field.support.value, values if field.support is Support.NEUTRAL else field.note]


def test_the_fields() -> None:
    assert rows_of("Fields") == [row(field) for field in FIELDS]


def test_what_is_called_supported_is_read() -> None:
    for known, body in ((CHAT_FIELDS, ChatBody), (COMPLETIONS_FIELDS, CompletionsBody)):
        supported = {name for name, field in known.items() if field.support is Support.SUPPORTED}
        assert supported == set(body.__struct_fields__)


def test_the_refusals() -> None:
    documented = {cells[1].strip("`"): int(cells[0]) for cells in rows_of("Errors")}
    assert {reason.value: documented.get(reason.value) for reason in RefusalReason} == {
        reason.value: reason.http_status for reason in RefusalReason
    }


async def test_the_routes(description: ModelDescription) -> None:
    documented = {tuple(cells[0].strip("`").split(" ")) for cells in rows_of("Routes")}
    async with serving(description) as server:
        router = server.router
        served = {
            (route.method, route.resource.canonical)
            for route in router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    assert documented == {
        (method, path.replace("{model}", "ID").replace("{request_id}", "ID")) for method, path in served
    }
