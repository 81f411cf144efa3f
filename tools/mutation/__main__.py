"""`python -m tools.mutation`: does the suite notice when the scheduler core is wrong?

Puts one fault after the other (see `faults`) into a copy of the tree in a temporary folder and runs the scheduler's
tests there. Exit 1: more than two faults stay unnoticed. Exit 2: a fault no longer fits the code, or the tests fail
without one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from tools.mutation.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIED = ("actors", "api", "connectors", "runner", "tools", "tests", "pyproject.toml")
TESTS = ("tests/conformance", "tests/scheduling")  # the faster one first: most faults end there
MOST_UNNOTICED = 2
LIMIT_S = 300.0  # a fault may make the core loop; the tests take half a minute


def misfits(root: Path) -> list[str]:
    """What of FAULTS does not fit the code under `root` any more."""
    found = []
    for fault in FAULTS:
        number = _file_of(root, fault).read_text().count(fault.old)
        if number != 1:
            found.append(f"{fault.module}.py has {number} times {fault.old!r} ({fault.what}): 1 is needed")
    return found


def _file_of(root: Path, fault: Fault) -> Path:
    return root / "actors" / "scheduling" / f"{fault.module}.py"


def _first_failure(root: Path) -> str:
    """Name of the first test that fails in the tree under `root`; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *TESTS]
    # Without bytecode: a fault may leave a file's size and second of change as they were.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
    try:
        run = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S:.0f} s"
    if run.returncode == 0:
        return ""
    told = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return told[0].split(" - ")[0].partition(" ")[2] if told else f"pytest exit {run.returncode}"


@click.command()
@click.option("--only", type=click.IntRange(1, len(FAULTS)), multiple=True, help="number of a fault; repeat for more")
def main(only: tuple[int, ...]) -> None:
    """Put one-line faults into a copy of the scheduler core and count those that its tests notice."""
    wrong = misfits(ROOT)
    if wrong:
        click.echo("\n".join(wrong), err=True)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="kvyard-mutation-") as folder:
        root = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, root / name)
        failure = _first_failure(root)
        if failure:
            click.echo(f"without a fault: {failure}", err=True)
            sys.exit(2)
        unnoticed = 0
        for number, fault in enumerate(FAULTS, 1):
            if only and number not in only:
                continue
            file = _file_of(root, fault)
            right = file.read_text()
            begin = time.perf_counter()
            file.write_text(right.replace(fault.old, fault.new))
            failure = _first_failure(root)
            file.write_text(right)
            unnoticed += not failure
            seconds = time.perf_counter() - begin
            click.echo(f"{number:2} {seconds:4.0f} s  {fault.module}: {fault.what}: {failure or 'NOT NOTICED'}")
    num_run = len(only) or len(FAULTS)
    click.echo(f"{num_run - unnoticed} of {num_run} faults are noticed")
    sys.exit(1 if unnoticed > MOST_UNNOTICED else 0)


if __name__ == "__main__":
    main()
