"""A folder that the native model does not compute → its description, as transformers' own modelling code has it.

The model is built without weights in a process of its own, so that transformers' weight (seconds, 360 MB) is felt once
for each model and not in the engine's process; the store keeps the answer. The same process refuses what cannot work.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription

HOW_TO_INSTALL = "in the repository's root, pip install -e '.[hf]'"
_EXAMINER = "runner.transformers_model.examine"


class Examined(msgspec.Struct, frozen=True):
    """What the examiner prints, as JSON on its last line. `refused`: in words; the sizes are void then."""

    refused: str = ""
    vocab_size: int = 0
    context_length: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0


def describe_through_transformers(
    folder: Path,
    config: dict[str, Any],
    digest: str,
    default_id: str,
    eos_token_ids: tuple[int, ...],
    obstacle: str,
) -> ModelDescription:
    """`obstacle`: why it is not native. Raises ConfigurationError when it cannot be served this way either."""
    natively = f"{folder}/config.json has {obstacle}, which kvyard does not run natively"
    try:
        examined = ask_transformers(folder)
    except ValueError as error:
        raise ConfigurationError(f"{natively}, and transformers could not be asked: {error}") from error
    if examined.refused:
        raise ConfigurationError(f"{natively}, and not through transformers either: {examined.refused}")
    return ModelDescription(
        folder="",
        weights=str(folder),
        architecture=str(config.get("model_type")),
        digest=digest,
        vocab_size=examined.vocab_size,
        context_length=examined.context_length,
        hidden_size=examined.hidden_size,
        intermediate_size=0,
        num_layers=examined.num_layers,
        num_heads=examined.num_heads,
        num_kv_heads=examined.num_kv_heads,
        head_size=examined.head_size,
        rms_norm_eps=0.0,
        rope_theta=0.0,
        eos_token_ids=eos_token_ids,
        bos_token_id=config.get("bos_token_id"),
        default_id=default_id,
        modelling="transformers",
    )


def ask_transformers(folder: Path) -> Examined:
    """Runs the examiner. Raises ValueError, with the last thing it said, when it ends without an answer."""
    command = [sys.executable, "-P", "-m", _EXAMINER, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return msgspec.json.decode(result.stdout.strip().rpartition("\n")[2], type=Examined)
    except msgspec.DecodeError as error:
        raise ValueError(result.stderr.strip().rpartition("\n")[2] or f"exit code {result.returncode}") from error
