"""A Hugging Face folder (config.json, *.safetensors, tokenizer.json) → ModelDescription and tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from runner.store.families import describe_native, obstacle
from runner.store.through_transformers import describe_through_transformers

_HARMLESS = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
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
    """Natively where kvyard's own model computes the configuration, else through transformers. ConfigurationError says
    why neither can."""
    config = read_json(folder / "config.json")
    eos_token_ids = _eos_token_ids(folder, config)
    if config.get("quantization_config") is not None:
        raise ConfigurationError(f"{folder}/config.json has a quantization_config; kvyard reads weights as they are")
    found = obstacle(config)
    if found:
        return describe_through_transformers(folder, config, digest, default_id, eos_token_ids, found)
    return describe_native(folder, config, digest, default_id, eos_token_ids)


def computation(folder: Path) -> bytes:
    """Of config.json what may change a key or a value: all but a few fields that certainly do not. Canonical JSON."""
    config = read_json(folder / "config.json")
    return json.dumps({key: config[key] for key in config.keys() - _HARMLESS}, sort_keys=True).encode()


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
