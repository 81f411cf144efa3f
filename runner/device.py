"""What the runner needs to know of the machine it runs on; the only place where a CPU is special.

Everything else creates its tensors on `Device.torch` and stays silent about what that is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from actors.messages.errors import ConfigurationError

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# glibc's mallopt parameters, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

Linear = Callable[[torch.Tensor], torch.Tensor]


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
        torch.set_num_threads(threads or available_cores())
        # torch allows this once per process, before any parallel work; a second runner in a process keeps the first's.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
        if self.is_cpu:
            _keep_freed_memory()
            _keep_few_kernels()
        else:
            # TF32 would make float32 inexact.
            torch.backends.cuda.matmul.allow_tf32 = False

    def tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """The array on the device; the copy does not make the host wait."""
        host = torch.from_numpy(values)
        return host if self.is_cpu else host.pin_memory().to(self.torch, non_blocking=True)

    def linear(self, weight: torch.Tensor) -> Linear:
        """x [tokens, in] → x · weightᵀ [tokens, out]. `weight` [out, in]; the caller gives it away.

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
