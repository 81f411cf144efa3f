"""The rotary part of a Hugging Face config.json → (theta, canonical JSON of the scaling) as ModelDescription has it.

transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`. Everything that the formulas need
is in the JSON afterwards, defaults included, so that two engines that agree on it turn their keys alike.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from actors.messages.errors import ConfigurationError

_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
KNOWN_SCALINGS = ("default", *_REQUIRED)


def parameters(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def scaling_kind(config: dict[str, Any]) -> str:
    values = parameters(config)
    return str(values.get("rope_type") or values.get("type") or "default")


def rope(folder: Path, config: dict[str, Any]) -> tuple[float, str]:
    """Of a config whose `scaling_kind` is known. Raises ConfigurationError when a number is missing."""
    values, kind = parameters(config), scaling_kind(config)
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind == "default":
        return theta, ""
    missing = [key for key in _REQUIRED[kind] if not isinstance(values.get(key), int | float)]
    if missing:
        raise ConfigurationError(f"{folder}/config.json: the {kind} rope scaling lacks {', '.join(missing)}")
    kept = {key: values[key] for key in _REQUIRED[kind]} | {"rope_type": kind}
    if kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
        kept["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    if kind == "yarn":
        kept["beta_fast"], kept["beta_slow"] = values.get("beta_fast") or 32, values.get("beta_slow") or 1
        kept["truncate"] = bool(values.get("truncate", True))
        kept["attention_factor"] = _attention_factor(values)
    return theta, json.dumps(kept, sort_keys=True)


def _attention_factor(values: dict[str, Any]) -> float:
    """0.1 · ln(factor) + 1 as in YaRN's paper, unless the config says otherwise; mscale: DeepSeek's variant."""
    given, mscale, of_all = (values.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(values["factor"]) + 1.0 if values["factor"] > 1 else 1.0

    if given is not None:
        return float(given)
    return magnitude(mscale) / magnitude(of_all) if mscale and of_all else magnitude(1.0)
