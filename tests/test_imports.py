"""The house of docs: an import only ever points down. Checked on the syntax trees and on `sys.modules`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Longest prefix wins. Each room may import the rooms named, and itself.
MAY_IMPORT: dict[str, set[str]] = {
    "actors.messages": set(),
    "actors.configuration": set(),
    "actors.kernel": {"actors.messages"},
    "actors.scheduling": {"actors.messages", "actors.configuration"},
    "connectors": {"actors.messages", "actors.configuration"},
    "runner": {"actors.messages", "actors.configuration"},
    "actors": {"actors.messages", "actors.configuration", "actors.kernel", "actors.scheduling", "connectors", "runner"},
    "api": {"actors", "actors.messages", "actors.configuration", "actors.kernel", "connectors", "runner"},
    "tools": {
        "actors",
        "actors.messages",
        "actors.configuration",
        "actors.kernel",
        "actors.scheduling",
        "connectors",
        "runner",
        "api",
    },
}
PURE = {"asyncio", "anyio", "torch", "time", "random", "socket", "threading", "uvloop"}


def room_of(module: str) -> str | None:
    hits = [room for room in MAY_IMPORT if module == room or module.startswith(room + ".")]
    return max(hits, key=len) if hits else None


def modules() -> list[tuple[str, Path]]:
    files = [path for top in ("actors", "connectors", "runner", "api", "tools") for path in (ROOT / top).rglob("*.py")]
    return [(".".join(path.relative_to(ROOT).with_suffix("").parts), path) for path in sorted(files)]


def imported(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_imports_point_down() -> None:
    wrong = []
    for module, path in modules():
        room = room_of(module)
        assert room is not None, module
        for name in imported(path):
            target = room_of(name)
            if target is not None and target != room and target not in MAY_IMPORT[room]:
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_every_init_is_empty() -> None:
    assert [str(path) for _, path in modules() if path.name == "__init__.py" and path.read_text()] == []


def test_the_scheduler_core_reaches_for_nothing() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules()
        if module.startswith("actors.scheduling")
        for name in imported(path)
        if name.split(".")[0] in PURE
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("actors.scheduling", {"asyncio", "torch", "aiohttp", "anyio"}),
        ("runner", {"aiohttp", "actors.kernel", "actors.admission", "actors.scheduler", "api"}),
        ("api", {"torch", "transformers"}),
        ("connectors", {"torch", "aiohttp"}),
    ],
)
def test_what_a_room_brings_in(room: str, forbidden: set[str]) -> None:
    names = [module for module, path in modules() if module.startswith(room) and path.name != "__init__.py"]
    assert names, f"{room} is empty"
    code = (
        f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {forbidden!r}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
