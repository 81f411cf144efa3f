"""How the native kernels come to be: built once, by whoever comes first, and done without where they cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actors.messages.errors import ConfigurationError
from runner.device import Device
from runner.kernels import registry
from runner.kernels.cpu import build
from runner.kernels.cpu.backend import CpuKernels
from runner.kernels.errors import BackendUnavailable
from runner.kernels.torch_kernels import TorchKernels

ROOT = Path(__file__).parents[3]
# A compiler that writes down each of its calls and makes what it is asked for out of nothing.
COMPILER = """#!/bin/sh
echo "$$" >> "{folder}/calls"
[ -e "{folder}/broken" ] && echo "tier.cpp:1: error: no such thing" >&2 && exit 1
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done
exit 0
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compiler"
    path.write_text(COMPILER.format(folder=tmp_path))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def calls(compiler: Path) -> int:
    path = compiler.parent / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_it_is_built_once(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    library = build.built(cache)
    once = calls(compiler)
    assert library.read_text() == "library\n"
    assert sorted(path.name for path in library.parent.iterdir()) == ["kvyard_cpu.sha256", "kvyard_cpu.so"]
    assert once > 3
    assert build.built(cache) == library
    assert calls(compiler) == once


def test_what_is_built_needs_no_compiler(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image whose compiler stayed in the stage before, or a cache that machines share."""
    library = build.built(tmp_path / "cache")
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert build.built(tmp_path / "cache") == library


def test_the_compiler_may_have_arguments(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{compiler} -O2")
    assert build.built(tmp_path / "cache").exists()


def test_two_that_start_together_build_once(compiler: Path, tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from runner.kernels.cpu.build import built; print(built(Path({str(tmp_path)!r})))"
    )
    command = [sys.executable, "-c", code]
    starting = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {process.communicate()[0].strip() for process in starting}
    assert [process.returncode for process in starting] == [0, 0]
    (library,) = found
    assert Path(library).read_text() == "library\n"
    alone = calls(compiler)
    build.built(tmp_path / "another")
    assert calls(compiler) == 2 * alone


def test_a_build_that_fails_leaves_nothing_and_says_why(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(BackendUnavailable, match=r"error: no such thing. install a C\+\+ compiler"):
        build.built(tmp_path / "cache")
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []
    (tmp_path / "broken").unlink()
    assert build.built(tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        ("no program\n", "", "cannot be run: Exec format error"),
        ("#!/bin/sh\n", "", "made no library"),
        ("#!/bin/sh\nprintf 'error: \\377' >&2; exit 1\n", "", "failed: error: \N{REPLACEMENT CHARACTER}"),
        ("#!/bin/sh\n", ' "', "cannot be read: No closing quotation"),
    ],
)
def test_what_is_no_compiler_is_named(
    script: str, arguments: str, reason: str, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.write_text(script)
    monkeypatch.setenv("CXX", f"{compiler}{arguments}")
    with pytest.raises(BackendUnavailable, match=f"{compiler}.* {reason}.*install a C"):
        build.built(tmp_path / "cache")


@pytest.mark.parametrize("rest", ["", "libr", "librarx\n", None])
def test_a_damaged_library_is_built_again(
    rest: str | None, compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To load half a library is a SIGBUS: at every start, with nothing in the log."""
    library = build.built(tmp_path / "cache")
    once = calls(compiler)
    if rest is None:
        library.with_name("kvyard_cpu.sha256").unlink()
    else:
        library.write_text(rest)
    assert build.built(tmp_path / "cache") == library
    assert library.read_text() == "library\n"
    assert calls(compiler) == 2 * once
    assert f"{library} is damaged, so the CPU kernels are built again" in caplog.text


def test_a_damaged_library_without_a_compiler_is_not_loaded(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.built(tmp_path / "cache").write_text("libr")
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(BackendUnavailable, match=r"no C\+\+ compiler"):
        build.built(tmp_path / "cache")


def test_without_a_compiler_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))

    def load(device: Device) -> CpuKernels:
        build.built(tmp_path)
        raise AssertionError

    monkeypatch.setattr("runner.kernels.cpu.backend.load", load)
    kernels = registry.choose(Device("cpu", "float32", 0))
    assert type(kernels) is TorchKernels
    (record,) = caplog.records
    assert record.getMessage().startswith("no cpu kernels, so plain torch computes, which is slower: no C++ compiler")
    assert "install a C++ compiler" in record.getMessage()


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BackendUnavailable, match="cannot be written"):
        build.built(tmp_path / "file")


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(BackendUnavailable, match=r"torch 2\.10 or newer, this is 2\.9\.1"):
        build.built(tmp_path)


def test_the_choice(native: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu", "bfloat16", 0)
    assert registry.choose(device).name == f"native CPU kernels, {native.tier}"
    monkeypatch.setenv("KVYARD_KERNELS", "torch")
    assert registry.choose(device).name == "plain torch"
    monkeypatch.setenv("KVYARD_KERNELS", "cuda")
    with pytest.raises(ConfigurationError, match="KVYARD_KERNELS='cuda' is unknown; kvyard knows auto, torch"):
        registry.choose(device)
    monkeypatch.delenv("KVYARD_KERNELS")
    # A device that nobody has written kernels for.
    device.torch = torch.device("meta")
    assert registry.choose(device).name == "plain torch"
