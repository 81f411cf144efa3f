"""The faults that `make mutation` puts into the scheduler core still fit it, and are spread over it."""

from __future__ import annotations

import ast

from tools.mutation.__main__ import ROOT, misfits
from tools.mutation.faults import FAULTS


def test_every_fault_fits_one_place() -> None:
    assert misfits(ROOT) == []


def test_there_are_forty_in_all_parts_of_the_core() -> None:
    assert len(FAULTS) == len({(fault.module, fault.old) for fault in FAULTS}) == 40
    assert len({fault.module for fault in FAULTS}) >= 15


def test_every_fault_leaves_a_module_that_can_be_read() -> None:
    for fault in FAULTS:
        text = (ROOT / "actors" / "scheduling" / f"{fault.module}.py").read_text()
        ast.parse(text.replace(fault.old, fault.new))
