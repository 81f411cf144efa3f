"""`python -m runner.transformers_model.examine FOLDER`: a folder's sizes, or why it is not served, as one JSON line.

A process of its own, started by the store (runner/store/through_transformers.py).
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from actors.messages.errors import ConfigurationError
from runner.store.through_transformers import Examined
from runner.transformers_model.attention import NotServed
from runner.transformers_model.loading import load_configuration
from runner.transformers_model.refusals import of_configuration, of_model


def examine(folder: str) -> Examined:
    try:
        configuration = load_configuration(folder)
        of_configuration(configuration)
        call = of_model(configuration)[0]
    except (NotServed, ConfigurationError) as error:
        return Examined(refused=str(error))
    except Exception as error:
        # transformers' own words for a model that it does not know or cannot build.
        return Examined(refused=" ".join(str(error).split())[:500])
    return Examined(
        vocab_size=_positive(configuration, "vocab_size"),
        context_length=_positive(configuration, "max_position_embeddings"),
        hidden_size=_positive(configuration, "hidden_size"),
        num_layers=_positive(configuration, "num_hidden_layers"),
        num_heads=call.query[1],
        num_kv_heads=call.key[1],
        head_size=call.key[2],
    )


def _positive(configuration: Any, name: str) -> int:
    return int(getattr(configuration, name))


if __name__ == "__main__":
    print(msgspec.json.encode(examine(sys.argv[1])).decode())
