"""A Hugging Face folder (config.json, *.safetensors, tokenizer.json) → ModelDescription and tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription

_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files, in order of name; of the index when there is one. Each is whole, or ConfigurationError."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if any(Path(name).name != name for name in names):
            raise ConfigurationError(f"{index} names files outside its folder")
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ConfigurationError(f"{folder} holds no .safetensors files: kvyard reads weights in that format only")
    for name in names:
        if not (folder / name).is_file():
            raise ConfigurationError(f"{folder} lacks {name}, which its index names. Fetch or copy the folder again")
        try:
            with safe_open(folder / name, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(
                f"the weights {folder / name} are damaged or cut short ({error}). Fetch or copy the file again"
            ) from error
    return [folder / name for name in names]


def describe_folder(folder: Path, digest: str, default_id: str) -> ModelDescription:
    config = read_json(folder / "config.json")
    _refuse_unsupported(folder, config)
    num_heads, hidden_size = _int(folder, config, "num_attention_heads"), _int(folder, config, "hidden_size")
    rope_theta, rope_scaling = _rope(folder, config)
    return ModelDescription(
        folder="",
        weights=str(folder),
        architecture="llama",
        digest=digest,
        vocab_size=_int(folder, config, "vocab_size"),
        context_length=_int(folder, config, "max_position_embeddings"),
        hidden_size=hidden_size,
        intermediate_size=_int(folder, config, "intermediate_size"),
        num_layers=_int(folder, config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_size=int(config.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(folder, config),
        bos_token_id=config.get("bos_token_id"),
        default_id=default_id,
    )


def tokenizer_files(folder: Path) -> dict[str, str]:
    if not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(
            f"{folder} has no tokenizer.json. Make one with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    files = {"tokenizer.json": (folder / "tokenizer.json").read_text()}
    if (folder / "chat_template.jinja").is_file():
        files["chat_template.jinja"] = (folder / "chat_template.jinja").read_text()
        return files
    template = read_json(folder / "tokenizer_config.json", optional=True).get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if template:
        files["chat_template.jinja"] = template
    return files


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} does not hold a JSON object")
    return value


def _refuse_unsupported(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if kind != "llama":
        raise ConfigurationError(f"{folder} has architecture {kind!r}; kvyard runs llama")
    wanted = {"hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None)}
    wanted |= {"quantization_config": (None,)}
    for name, values in wanted.items():
        if config.get(name, values[0]) not in values:
            raise ConfigurationError(f"{folder}/config.json has {name} {config[name]!r}; kvyard runs {values[0]!r}")


def _int(folder: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{folder}/config.json: {name} must be a positive number, not {value!r}")
    return value


def _rope(folder: Path, config: dict[str, Any]) -> tuple[float, str]:
    """(theta, canonical JSON of the scaling). transformers 5 writes `rope_parameters`, older ones two fields."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, ""
    if kind not in _SCALING_KEYS:
        raise ConfigurationError(
            f"{folder}/config.json scales its positions by {kind!r}; kvyard knows default, linear and llama3"
        )
    missing = [key for key in _SCALING_KEYS[kind] if not isinstance(parameters.get(key), int | float)]
    if missing:
        raise ConfigurationError(f"{folder}/config.json: the {kind} rope scaling lacks {', '.join(missing)}")
    return theta, json.dumps(
        {key: parameters[key] for key in _SCALING_KEYS[kind]} | {"rope_type": kind}, sort_keys=True
    )


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Of generation_config.json and config.json together; else the token that tokenizer_config.json names."""
    found: list[int] = []
    for source in (read_json(folder / "generation_config.json", optional=True), config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    if not found:
        name = read_json(folder / "tokenizer_config.json", optional=True).get("eos_token")
        content = name.get("content") if isinstance(name, dict) else name
        added = read_json(folder / "tokenizer.json", optional=True).get("added_tokens", [])
        found = [token["id"] for token in added if token.get("content") == content]
    return tuple(dict.fromkeys(found))
