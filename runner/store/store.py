"""The model store: a model's name, file or folder → its description, converted once and kept in the cache.

    <cache>/weights/<id>/…gguf          weights of known models, checked by SHA-256
    <cache>/models/<key>/               tokenizer.json, chat_template.jinja, description.json; the key covers all inputs
    <cache>/digests/, <cache>/locks/    remembered digests of weights; locks between processes

Imports neither torch nor transformers: the API process resolves a model too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from actors.messages.errors import ConfigurationError
from actors.messages.model import ModelDescription
from runner.store import describe_folder
from runner.store.cache import appearing_folder, default_cache, locked, remembered_sha256, writable
from runner.store.catalogue import KNOWN_MODELS
from runner.store.fetch import fetched

# Part of every key: raise it when what is written into the folders changes.
_CONVERSION = 2
_DESCRIPTION = "description.json"
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def _silent(_: str) -> None:
    pass


def resolve(model: str, cache: Path | None = None, progress: Callable[[str], None] = _silent) -> ModelDescription:
    """The description of a known id, a .gguf file or a Hugging Face folder, with all its files in place.

    Blocks: the first time it fetches and converts, later it takes some milliseconds. `progress` gets a line for each
    thing that takes long. Safe to call from several processes at once. Raises ConfigurationError that says what to do.
    """
    cache = default_cache() if cache is None else cache
    if model in KNOWN_MODELS:
        return _resolve_gguf(fetched(KNOWN_MODELS[model], cache, progress), model, cache, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _resolve_folder(path.resolve(), cache, progress)
    if path.is_file():
        return _resolve_gguf(path.resolve(), path.stem, cache, progress)
    raise ConfigurationError(
        f"there is no model {model!r}: known ids are {', '.join(KNOWN_MODELS)}; "
        "a path must lead to a .gguf file or to a Hugging Face folder"
    )


def is_in_place(model: str, cache: Path | None = None) -> bool:
    """Whether `resolve` is sure to take some milliseconds only. Known ids alone can be told so quickly."""
    cache = default_cache() if cache is None else cache
    known = KNOWN_MODELS.get(model)
    if known is None or not (cache / "weights" / known.model_id / known.file_name).exists():
        return False
    return _read(_folder(cache, known.sha256)) is not None


def _resolve_gguf(weights: Path, default_id: str, cache: Path, progress: Callable[[str], None]) -> ModelDescription:
    digest = remembered_sha256(weights, cache)

    def convert() -> tuple[ModelDescription, dict[str, str]]:
        # Only here: NumPy and `gguf` cost whoever finds the model converted a quarter of a second.
        from runner.store import describe_gguf
        from runner.weights.gguf_header import read_gguf_header

        header = read_gguf_header(weights)
        return describe_gguf.describe_gguf(header, digest, default_id), describe_gguf.tokenizer_files(header)

    description = _converted(digest, convert, cache, default_id, progress)
    return msgspec.structs.replace(description, weights=str(weights), default_id=default_id)


def _resolve_folder(folder: Path, cache: Path, progress: Callable[[str], None]) -> ModelDescription:
    weights = hashlib.sha256()
    for path in describe_folder.weight_files(folder):
        weights.update(f"{path.name}={remembered_sha256(path, cache)}\n".encode())
    # The configuration too: equal weights turned or normed otherwise make other keys.
    weights.update(describe_folder.computation(folder))
    digest = weights.hexdigest()
    everything = hashlib.sha256(f"{digest} {_transformers_version()}\n".encode())
    for name in _SMALL_FILES:
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        everything.update(f"{name}={len(content)}\n".encode() + content)

    def convert() -> tuple[ModelDescription, dict[str, str]]:
        description = describe_folder.describe_folder(folder, digest, folder.name)
        return description, describe_folder.tokenizer_files(folder)

    description = _converted(everything.hexdigest(), convert, cache, folder.name, progress)
    return msgspec.structs.replace(description, weights=str(folder), default_id=folder.name)


def _transformers_version() -> str:
    """What it knows of a model may change with it; "" when it is not installed."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


def _converted(
    key: str,
    convert: Callable[[], tuple[ModelDescription, dict[str, str]]],
    cache: Path,
    name: str,
    progress: Callable[[str], None],
) -> ModelDescription:
    folder = _folder(cache, key)
    description = _read(folder)
    if description is None:
        with locked(cache, folder.name), writable(cache):
            description = _read(folder)
            if description is None:
                progress(f"converting the tokenizer and configuration of {name}")
                made, files = convert()
                description = msgspec.structs.replace(made, folder=str(folder))
                with appearing_folder(folder) as work:
                    for file_name, content in files.items():
                        (work / file_name).write_text(content)
                    (work / _DESCRIPTION).write_bytes(msgspec.json.encode(description))
    return msgspec.structs.replace(description, folder=str(folder))


def _folder(cache: Path, key: str) -> Path:
    return cache / "models" / f"{key[:32]}-{_CONVERSION}"


def _read(folder: Path) -> ModelDescription | None:
    try:
        return msgspec.json.decode((folder / _DESCRIPTION).read_bytes(), type=ModelDescription)
    except (OSError, msgspec.DecodeError):
        return None
