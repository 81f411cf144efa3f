"""A process that writes a step log until it is killed; says how many records every flush has brought into the file."""

from __future__ import annotations

import sys

from actors.scheduling.records import StepNote
from actors.step_log.writer import StepLog
from tests.actors.step_log.logs import header_of

if __name__ == "__main__":
    step_log = StepLog.open(sys.argv[1], header_of())
    number = 0
    while True:
        for _ in range(1 + number % 7):
            number += 1
            step_log.write(StepNote(number, 0.1, 0.2, 0.3, 0.4))
        step_log.flush()
        print(number, flush=True)
