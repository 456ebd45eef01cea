"""`python -m tests.cli.as_on_macos MODULE ARGS ...`: a module as on a Mac, as far as Python's names tell.

What macOS's Python and C library lack is taken away before the module is imported: names of modules, /proc, functions
of libc, and torch's libraries under their Linux names. torch itself is imported before, as it was built for Linux.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import resource
import runpy
import select
import signal
import socket
import sys
import sysconfig
import tempfile
import time
from types import ModuleType
from typing import Any

# Python's documentation gives the availability of each; a Mac has none of these.
MISSING: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (
        os,
        (
            *("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "pidfd_open", "eventfd", "splice", "pipe2"),
            *("sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_setscheduler", "sched_getparam"),
            *("posix_fallocate", "posix_fadvise", "copy_file_range", "getresuid", "getresgid", "setresuid"),
            *("O_TMPFILE", "O_PATH", "O_NOATIME", "O_DIRECT", "getrandom", "setns", "unshare", "getxattr"),
        ),
    ),
    (signal, ("SIGRTMIN", "SIGRTMAX", "SIGSTKFLT", "SIGPWR", "SIGPOLL", "SIGCLD", "sigtimedwait", "sigwaitinfo")),
    (mmap, ("MADV_REMOVE", "MADV_DONTFORK", "MADV_DOFORK", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MAP_POPULATE")),
    (time, ("pthread_getcpuclockid", "CLOCK_BOOTTIME", "CLOCK_TAI")),
    (resource, ("prlimit", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_SIGPENDING", "RUSAGE_THREAD")),
    (select, ("epoll", "EPOLLIN", "EPOLLOUT")),
    (socket, ("AF_NETLINK", "AF_PACKET", "SO_BINDTODEVICE")),
)
OF_GLIBC = (
    *("prctl", "malloc_trim", "mallopt", "mallinfo2", "gnu_get_libc_version", "memfd_create", "gettid", "tgkill"),
    *("sem_clockwait", "sched_getcpu", "fallocate"),
)


def become_a_mac() -> None:
    """Take away from this process what a Mac has not."""
    for module, names in MISSING:
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    _without_proc()
    real_getattr = ctypes.CDLL.__getattr__
    real_init: Any = ctypes.CDLL.__init__

    def getattr_(self: ctypes.CDLL, name: str) -> Any:
        if name in OF_GLIBC:
            raise AttributeError(f"dlsym: symbol not found: {name}")
        return real_getattr(self, name)

    def init(self: ctypes.CDLL, name: Any = None, *args: Any, **kwargs: Any) -> None:
        if str(name).endswith(".dylib"):
            name = str(name).removesuffix(".dylib") + ".so"
        elif ".so" in str(name):
            raise OSError(f"dlopen({name}): no such file")
        real_init(self, name, *args, **kwargs)

    ctypes.CDLL.__getattr__ = getattr_  # type: ignore[method-assign]
    ctypes.CDLL.__init__ = init  # type: ignore[method-assign]
    sys.platform = "darwin"


def _without_proc() -> None:
    def deny(path: Any) -> None:
        if (
            isinstance(path, str | os.PathLike)
            and (text := os.fspath(path))
            and str(text).startswith(("/proc", "/dev/shm"))
        ):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(text))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir", "os.mkdir") and args:
            deny(args[0])

    sys.addaudithook(hook)
    for name in ("stat", "lstat", "readlink", "access"):
        real = getattr(os, name)

        def guarded(path: Any, *args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            if _name == "access" and str(path).startswith(("/proc", "/dev/shm")):
                return False
            deny(path)
            return _real(path, *args, **kwargs)

        setattr(os, name, guarded)


if __name__ == "__main__":
    sysconfig.get_config_vars()
    importlib.import_module("torch.distributed.run")
    importlib.import_module("torch.utils._python_dispatch")
    become_a_mac()
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
