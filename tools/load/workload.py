"""What a run sends: random prompts of an exact number of tokens, the same for the same seed. Pure.

No two prompts of a run share a beginning, and the warm-up's are others again, so no prefix cache flatters the figures.
"""

from __future__ import annotations

import random

import msgspec

# Below lie the special and byte tokens of every vocabulary we know.
LOWEST_TOKEN_ID = 1000


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`vocabulary`: token ids below it are valid at the server."""

    requests: int
    input_len: int  # tokens
    output_len: int  # tokens
    vocabulary: int
    seed: int = 0

    def prompt(self, index: int, *, warm_up: bool = False) -> list[int]:
        lowest = min(LOWEST_TOKEN_ID, self.vocabulary // 2)
        draw = random.Random(f"{self.seed}:{'warm-up' if warm_up else 'run'}:{index}")
        return [draw.randrange(lowest, self.vocabulary) for _ in range(self.input_len)]
