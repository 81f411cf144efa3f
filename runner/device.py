"""What the runner needs to know of the machine it runs on; the only place where a CPU is special.

Everything else creates its tensors on `Device.torch` and stays silent about what that is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from actors.messages.errors import ConfigurationError

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# glibc's mallopt parameters, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

Linear = Callable[[torch.Tensor], torch.Tensor]
Embedding = Callable[[torch.Tensor], torch.Tensor]
Mark = float | torch.cuda.Event  # a point in the device's work, see `Device.mark`


class HostCopy(msgspec.Struct, frozen=True):
    """A tensor on its way to the host."""

    tensor: torch.Tensor  # in host memory
    arrived: torch.cuda.Event | None  # None: it is there

    @property
    def done(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def values(self) -> npt.NDArray[np.int32]:
        """Waits for the copy, asleep and without the GIL."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensor.numpy()


class Device:
    """A device made ready: threads set, dtype checked."""

    def __init__(self, name: str, dtype: str, threads: int) -> None:
        """Raises ConfigurationError when the machine has no such device, or the dtype is unknown."""
        if dtype not in _DTYPES:
            raise ConfigurationError(f"dtype {dtype!r} is unknown; kvyard knows {', '.join(_DTYPES)}")
        if name not in ("cpu", "cuda"):
            raise ConfigurationError(f"device {name!r} is unknown; kvyard knows cpu and cuda")
        if name == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError("device cuda: torch finds no GPU here; use --device cpu or install torch for CUDA")
        self.torch = torch.device(name)
        self.dtype = _DTYPES[dtype]
        self.is_cpu = name == "cpu"
        self.is_asynchronous = not self.is_cpu  # work is queued: to look at a value is to wait for all of it
        self._threads = threads or available_cores()
        torch.set_num_threads(self._threads)
        # torch allows this once per process, before any parallel work; a second runner in a process keeps the first's.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
        if self.is_cpu:
            _keep_freed_memory()
            _keep_few_kernels()
        else:
            # TF32 would make float32 inexact.
            torch.backends.cuda.matmul.allow_tf32 = False

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around the loading of weights: on one thread, for it is many small operations, between which others would
        wake up and sleep again; afterwards the temporaries' memory, a few hundred MB that no step needs, is
        the system's again."""
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)

    def tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """The array on the device; the copy does not make the host wait."""
        host = torch.from_numpy(values)
        return host if self.is_cpu else host.pin_memory().to(self.torch, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """int32 [n] → its copy, ordered behind everything that was queued on the device so far; nobody waits here."""
        if self.is_cpu:
            return HostCopy(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record()
        return HostCopy(host, arrived)

    def mark(self, clock: Callable[[], float]) -> Mark:
        """This point in the device's work: the host's time where the host does the work, else an event on the device.

        An event is passed when the device has come to it, so what the host spends ahead of the device is not counted.
        """
        if self.is_cpu:
            return clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def linear(self, weight: torch.Tensor) -> Linear:
        """x [tokens, in] → x · weightᵀ [tokens, out]. `weight` [out, in].

        On a CPU bfloat16 weights are laid out once as oneDNN wants them: a third off a decode step.
        """
        if self.is_cpu and self.dtype is torch.bfloat16 and torch._C._has_mkldnn:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_TOKENS)
            multiply = torch.ops.mkldnn._linear_pointwise

            def packed_linear(x: torch.Tensor) -> torch.Tensor:
                product: torch.Tensor = multiply(x, packed, None, "none", [], "")
                return product

            return packed_linear
        return lambda x: torch.nn.functional.linear(x, weight)


def seconds_between(earlier: Mark, later: Mark) -> float:
    """Two marks of one device, which has passed both."""
    if isinstance(earlier, float):
        assert isinstance(later, float)
        return later - earlier
    assert not isinstance(later, float)
    return float(earlier.elapsed_time(later)) / 1000


# The number of tokens that oneDNN lays the weights out for; other numbers work with the same layout.
_PACKED_FOR_TOKENS = 16


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keep_freed_memory() -> None:
    """Activations of some MB come from the heap and stay there; else page faults take up to half of an operation."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_ARENA_MAX, 1)


# torch's cache and oneDNN's own below it; both are read at the first product.
_KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
_KEPT_KERNELS = 256


def _keep_few_kernels() -> None:
    """oneDNN makes a kernel for each weight shape and number of tokens, some 0.6 MB each, and keeps 1,024: a GB in the
    long run. 256 are those of the last 50 batch sizes; to make one anew takes a tenth of a millisecond to one."""
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KEPT_KERNELS))
