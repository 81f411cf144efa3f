"""The cache folder on disk: locks between processes, atomic appearance of files and folders, remembered digests.

Invariant: whatever has its final name is whole. Work in progress has a name of its own and moves into place by rename;
a process that dies in the middle leaves only a file that the next one deletes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.messages.errors import ConfigurationError

_CHUNK = 1 << 22


def default_cache() -> Path:
    """$KVYARD_CACHE, or ~/.cache/kvyard."""
    chosen = os.environ.get("KVYARD_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "kvyard"


@contextmanager
def writable(cache: Path) -> Iterator[None]:
    """Turns what the file system refuses inside the block into a ConfigurationError that names the cache."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"the model cache {cache} cannot be written: {error.strerror or error}. "
            "Free some space, mend its permissions, or set KVYARD_CACHE to a folder of yours"
        ) from error


@contextmanager
def locked(cache: Path, name: str) -> Iterator[None]:
    """Holds the lock `name` of the cache against other processes. The system frees it when its holder dies."""
    with writable(cache):
        folder = cache / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / f"{name}.lock").open("w")
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def appearing_folder(final: Path) -> Iterator[Path]:
    """A folder to fill that becomes `final` at the end of the block. The caller holds the lock of `final`."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for left_over in final.parent.glob(f".{final.name}.*"):
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        yield work
        if final.exists():
            shutil.rmtree(final)
        work.chmod(0o755)
        work.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def remembered_sha256(path: Path, cache: Path) -> str:
    """Hex SHA-256 of a file, kept in the cache for as long as its path, size, inode and modification time stay."""
    try:
        stat = path.stat()
        signature = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
        memo = cache / "digests" / hashlib.sha256(signature.encode()).hexdigest()
        try:
            known = memo.read_text()
        except OSError:
            known = ""
        if len(known) == 64:
            return known
        digest = file_sha256(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    with writable(cache):
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memo.parent, delete=False) as handle:
            handle.write(digest)
        Path(handle.name).replace(memo)
    return digest
