"""The step table: one row per request and step, as text in columns."""

from __future__ import annotations

from collections.abc import Iterator

from tools.scenarios.driver import Observation
from tools.scenarios.format import Action

HEADER = ("action", "step", "request", "tokens", "computed", "status", "what happened")


def rows_of(action: Action, observation: Observation, index: int, step: int) -> Iterator[tuple[str, ...]]:
    """The rows of one action; a schedule has one for every request that is live after it."""
    label, number = f"{index} {action.kind}", str(step) if action.kind in ("schedule", "update") else ""
    if action.kind == "schedule":
        for name, status in observation["status"].items():
            notes = [what for what in ("new", "resumed", "preempted") if name in observation[what]]
            counted = [what for what in ("cached", "loading", "spec") if name in observation[what]]
            notes += [f"{what} {observation[what][name]}" for what in counted]
            tokens = str(observation["scheduled"].get(name, ""))
            yield label, number, name, tokens, str(observation["computed"][name]), status, ", ".join(notes)
        return
    outcome = [
        *(f"{name}: {tokens}" for name, tokens in observation.get("output", {}).items()),
        *(f"{name} ends: {reason}" for name, reason in observation.get("finished", {}).items()),
    ]
    if "ok" in observation:
        outcome.append("done" if observation["ok"] else "refused: blocks are held")
    if action.kind in ("add", "abort", "grammar_ready"):
        outcome.insert(0, " ".join(getattr(action, action.kind)))
    yield label, number, "", "", "", "", "; ".join(outcome)


def render(rows: list[tuple[str, ...]]) -> str:
    lines = [HEADER, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
