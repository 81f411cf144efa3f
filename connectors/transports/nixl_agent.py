"""The one place that imports NIXL: its environment, its agent, and whether this machine can use it.

UCX reads its settings from the environment when it is first loaded, so they are set before the import; what the user
has set wins. Shared memory reads (CMA) need the right to read another process's memory, which containers may refuse:
then UCX gets TCP alone. NIXL's progress thread spins on a core unless its delay is set, which the Python API of 1.5.1
cannot do: the configuration class is wrapped while the agent is made (the version is pinned for that).
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
import threading
from typing import Any

PROGRESS_DELAY_US = 1000  # wakes 1,000 times a second at most: 1.2 % of a core
_DEFAULTS = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n"}
_making = threading.Lock()


def installed() -> bool:
    """Whether the package is there; a machine may still refuse to run it."""
    return sys.platform == "linux" and importlib.util.find_spec("nixl_cu12") is not None


def may_read_processes() -> bool:
    """Whether the kernel lets us use process_vm_readv at all. (seccomp profiles refuse it even for oneself.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return False

    class Span(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)
    here = Span(ctypes.addressof(target), 1)
    there = Span(ctypes.addressof(source), 1)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return bool(libc.process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 1)


def set_environment() -> None:
    tls = "tcp,sm" if may_read_processes() and os.access("/dev/shm", os.W_OK) else "tcp"
    for name, value in {**_DEFAULTS, "UCX_TLS": tls}.items():
        os.environ.setdefault(name, value)


def make_agent(name: str, progress_delay_us: int = PROGRESS_DELAY_US) -> tuple[Any, Any]:
    """(agent, the module of its exceptions). Raises ImportError, or whatever NIXL raises where it cannot run."""
    set_environment()
    import nixl_cu12._api as api

    logging.getLogger("nixl").setLevel(logging.WARNING)  # it greets on stdout
    bindings = api.nixlBind

    base = bindings.nixlAgentConfig

    def set_delay(configuration: Any, _: int) -> None:
        base.pthrDelay.fset(configuration, progress_delay_us)

    delayed = type("nixlAgentConfig", (base,), {"pthrDelay": property(base.pthrDelay.fget, set_delay)})

    class Bindings:
        def __getattr__(self, attribute: str) -> Any:
            return delayed if attribute == "nixlAgentConfig" else getattr(bindings, attribute)

    with _making:
        api.nixlBind = Bindings()
        try:
            agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        finally:
            api.nixlBind = bindings
    if "UCX" not in agent.backends:
        raise ImportError("NIXL has no UCX backend here")
    return agent, bindings
