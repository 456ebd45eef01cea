"""Environment variables of a simulated process, as Python, C code and programs it starts see them."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from distsim.errors import NotSimulated
from distsim.sim.task import current_process, current_task

__all__ = ["enter_environ", "environ_patches", "leave_environ"]

_real_putenv, _real_unsetenv = os.putenv, os.unsetenv


def enter_environ(data: dict[bytes, bytes], changed: dict[bytes, None]) -> None:
    """Put a process's environment into `os.environ` and, what it *changed* itself, into C's."""
    os.environ._data = os.environb._data = data  # type: ignore[attr-defined]
    for key in changed:
        _put(key, data.get(key))


def leave_environ(host: dict[bytes, bytes], changed: dict[bytes, None]) -> None:
    """Back to the *host*'s own."""
    os.environ._data = os.environb._data = host  # type: ignore[attr-defined]
    for key in changed:
        _put(key, host.get(key))


def _put(key: bytes, value: bytes | None) -> None:
    if value is None:
        _real_unsetenv(key)
    else:
        _real_putenv(key, value)


def environ_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of what changes or passes on the environment."""
    real_system, real_execute = os.system, subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def putenv(key: bytes, value: bytes) -> None:
        process = current_process()
        if process is not None:
            process.changed_environ[os.fsencode(key)] = None
        _real_putenv(key, value)

    def unsetenv(key: bytes) -> None:
        process = current_process()
        if process is not None:
            process.changed_environ[os.fsencode(key)] = None
        _real_unsetenv(key)

    def execute(self: Any, *args: Any) -> None:
        if current_task() is not None and args[6] is None:  # env: C's environment lacks RANK and its like
            args = (*args[:6], dict(os.environ), *args[7:])
        real_execute(self, *args)

    def system(command: str | bytes) -> int:
        if current_task() is None:
            return real_system(command)
        code = subprocess.call(command, shell=True)
        return code << 8 if code >= 0 else -code

    patches: list[tuple[Any, str, Any]] = [
        (os, "putenv", putenv),
        (os, "unsetenv", unsetenv),
        (os, "system", system),
        (subprocess.Popen, "_execute_child", execute),
    ]
    for name in ("execv", "execve"):
        patches.append((os, name, _refused_in_rank(name, getattr(os, name))))
    return patches


def _refused_in_rank(name: str, real: Any) -> Any:
    def call(*args: Any) -> Any:
        if current_task() is None:
            return real(*args)
        raise NotSimulated(f"os.{name}", "it would replace all ranks at once; use subprocess.run")

    return call
