"""Builds the native CPU kernels with the machine's C++ compiler, once, into kvyard's cache folder.

Every tier is in the library, so a cache that several machines share serves them all, those without a compiler too. The
folder's name is a digest of sources and torch; whoever comes second waits for the first, and a library under its final
name is whole: its own digest lies beside it, because loading one that a crash or a copy cut off ends the process.
`python -m runner.kernels.cpu.build` builds it ahead of the first start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from actors.messages.errors import ConfigurationError
from runner.device import available_cores
from runner.kernels.errors import BackendUnavailable
from runner.store.cache import appearing_folder, default_cache, file_sha256, locked, writable

_FOLDER = Path(__file__).parent
_LIBRARY, _WHOLE = "kvyard_cpu.so", "kvyard_cpu.sha256"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wno-psabi", "-DNDEBUG")
_TORCH_FILES = ("operators.cpp", "product_operators.cpp", "threads.cpp")  # the only ones that see torch's headers
_FILES = ("tiers.cpp", "work.cpp", "weight_packer.cpp")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")  # no CPU has the first without the others
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
# Each compiles tier.cpp: the table's name and what the compiler may use.
_TIERS = {"kPortable": ("-DKVYARD_FIRST_TIER",)}
_X86_TIERS = {"kAvx2": _AVX2, "kAvx512": _AVX512, "kAvx512Bf16": (*_AVX512, "-mavx512bf16")}
# Likewise quantized_tier.cpp.
_QUANTIZED_TIERS: dict[str, tuple[str, ...]] = {"kQuantizedPortable": ()}
_X86_QUANTIZED_TIERS = {
    "kQuantizedAvx2": _AVX2,
    "kQuantizedAvx512": _AVX512,
    "kQuantizedVnni": (*_AVX512, "-mavx512vnni"),
}
_COMPILERS = ("c++", "g++", "clang++")
_HELP = "install a C++ compiler (g++ 11 or clang 14, or newer), or name one in CXX, and start again"
_FIRST_TORCH = (2, 10)  # the first whose stable ABI tells the number of threads

logger = logging.getLogger(__name__)


def built(cache: Path) -> Path:
    """The library, which is built when the cache does not have it. Raises BackendUnavailable."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _FIRST_TORCH:
        raise BackendUnavailable(f"they need torch 2.10 or newer, this is {torch.__version__}")
    final = cache / "kernels" / f"cpu-{_digest()}"
    library = final / _LIBRARY
    if _is_whole(library):
        return library
    if library.exists():
        logger.warning("%s is damaged, so the CPU kernels are built again", library)
    compiler = _compiler()
    try:
        with locked(cache, final.name), writable(cache):
            if not _is_whole(library):
                started = time.perf_counter()
                logger.info("building the CPU kernels, once, with %s", shlex.join(compiler))
                with appearing_folder(final) as work:
                    _build(compiler, work)
                logger.info("built the CPU kernels in %.0f s", time.perf_counter() - started)
    except ConfigurationError as error:
        raise BackendUnavailable(str(error)) from error
    return library


def _is_whole(library: Path) -> bool:
    try:
        return library.with_name(_WHOLE).read_text() == file_sha256(library)
    except (OSError, ValueError):
        return False


def _compiler() -> list[str]:
    """The command, and the arguments that CXX gives it."""
    chosen = os.environ.get("CXX")
    try:
        commands = [shlex.split(chosen)] if chosen else [[name] for name in _COMPILERS]
    except ValueError as error:
        raise BackendUnavailable(f"CXX={chosen} cannot be read: {error}; {_HELP}") from error
    for command in commands:
        found = shutil.which(command[0]) if command else None
        if found is not None:
            return [found, *command[1:]]
    raise BackendUnavailable(f"no C++ compiler found{f' by CXX={chosen}' if chosen else ''}; {_HELP}")


def _tiers() -> dict[str, tuple[str, ...]]:
    """Source and flags of each table of kernels."""
    x86 = platform.machine() == "x86_64"
    tiers = {name: ("tier.cpp", *flags) for name, flags in (_TIERS | (_X86_TIERS if x86 else {})).items()}
    quantized = _QUANTIZED_TIERS | (_X86_QUANTIZED_TIERS if x86 else {})
    return tiers | {name: ("quantized_tier.cpp", *flags) for name, flags in quantized.items()}


def _digest() -> str:
    """Of everything that the library comes from but the compiler, which not every machine of a shared cache has."""
    digest = hashlib.sha256(repr((torch.__version__, platform.machine(), _FLAGS, _tiers())).encode())
    for path in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: list[str], work: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    units: dict[str, tuple[str, ...]] = {path.removesuffix(".cpp"): (path,) for path in _FILES}
    units |= {name: (source, f"-DKVYARD_TIER={name}", *flags) for name, (source, *flags) in _tiers().items()}
    includes = ("-isystem", str(torch_folder / "include"))
    units |= {Path(name).stem: (name, *includes) for name in _TORCH_FILES}

    def compile_unit(name: str) -> None:
        source, *flags = units[name]
        _run([*compiler, *_FLAGS, *flags, "-c", str(_FOLDER / source), "-o", str(work / f"{name}.o")])

    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(compile_unit, reversed(units)))
    objects = [str(work / f"{name}.o") for name in units]
    libraries = (f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-pthread")
    _run([*compiler, "-shared", *objects, *libraries, "-o", str(work / _LIBRARY)])
    for path in objects:
        Path(path).unlink(missing_ok=True)
    if not (work / _LIBRARY).exists():
        raise BackendUnavailable(f"{shlex.join(compiler)} made no library. {_HELP}")
    (work / _WHOLE).write_text(file_sha256(work / _LIBRARY))


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:  # not a program of this machine, say
        raise BackendUnavailable(f"{command[0]} cannot be run: {error.strerror or error}. {_HELP}") from error
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()[-1:]
        raise BackendUnavailable(f"{' '.join(command)} failed: {lines[0] if lines else result.returncode}. {_HELP}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(built(default_cache()))
    except BackendUnavailable as error:
        print(f"kvyard: no CPU kernels, so plain torch computes, which is slower: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
