"""What a layer may want of attention beyond the plain kind."""

from __future__ import annotations

import msgspec


class Asked(msgspec.Struct, frozen=True):
    scale: float  # scores = scale · query · key
    softcap: float | None = None  # c: scores → c · tanh(scores / c), before the mask
    window: int | None = None  # a query sees its own token and the window - 1 before it
