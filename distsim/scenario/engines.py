"""Engines that run scenarios elsewhere: Ray, dask and SLURM, each as an `Executor`."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from importlib import import_module
from typing import Any

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, digits

Made = tuple[Callable[[], Executor], int]
"""How an executor is made, and how many tasks it runs at a time."""
SLURM_WIDTH = 64
"""Jobs that are queued or run at a time."""
SLURM_MINUTES = 24 * 60
"""Time limit of a job whose flags have no --time."""
POLL_S = 0.5
"""Interval at which jobs are looked at, and in which those that are submitted become one array."""


def _module(engine: str, module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise UsageError(
            f"--pool {engine}: {package} is not installed; pip install '.[{engine}]' in a clone of distsim"
        ) from None


def _knock(engine: str, address: str) -> None:
    """Raise at once if nothing listens at *host:port*: the engines themselves try for minutes."""
    host, colon, port = address.rpartition("/")[2].rpartition(":")
    number = digits(port)
    if not colon or number is None or number >= 1 << 16:
        raise UsageError(f"--pool {engine}:{brief(address)}: expected {engine}:HOST:PORT")
    try:
        socket.create_connection((host, number), timeout=10).close()
    except OSError as error:
        raise UsageError(f"--pool {engine}:{address}: nothing listens there ({error.strerror or error})") from None


def _in_one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Ray(Executor):
    """Tasks of a Ray cluster, with the memory that the largest one so far has needed."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._peak_bytes = ray, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        memory = {"memory": self._peak_bytes} if self._peak_bytes else {}
        future: Future[Any] = self._ray.remote(max_retries=0, **memory)(fn).remote(*args, **kwargs).future()
        future.add_done_callback(self._learn)
        return future

    def _learn(self, future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None and (ended := getattr(future.result(), "ended", None)):
            self._peak_bytes = max(self._peak_bytes, ended.peak_bytes)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._ray.shutdown()


def ray(address: str) -> Made:
    """Return Ray at *address*; empty: a Ray of this machine is started."""
    module = _module("ray", "ray", "ray")
    if address and address != "auto":
        _knock("ray", address)
    try:
        module.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--pool ray:{address}: no Ray cluster there ({_in_one_line(error)})") from None
    return (lambda: _Ray(module)), max(1, int(module.cluster_resources().get("CPU", 1)))


def dask(address: str) -> Made:
    """Return the dask scheduler at *address*, by its own executor."""
    module = _module("dask", "distributed", "distributed")
    _knock("dask", address)
    try:
        client = module.Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--pool dask:{address}: no dask scheduler there ({_in_one_line(error)})") from None
    threads = sum(client.nthreads().values())
    if not threads:
        raise UsageError(f"--pool dask:{address}: the scheduler has no worker; start some (dask worker {address})")
    return (lambda: client.get_executor(pure=False)), threads


class _Submitit(Executor):
    """Jobs of submitit. Those that are submitted at about one time are one job array."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._new: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []
        self._jobs: list[tuple[Future[Any], Any]] = []
        self._ends = threading.Event()
        self._failed = False
        self._follower = threading.Thread(target=self._follow, name="submitit", daemon=True)
        self._follower.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._new.append((future, fn, args))
        return future

    def _follow(self) -> None:
        while not self._ends.wait(POLL_S):
            new, self._new = self._new, []
            jobs: list[Any] = []
            try:
                if new:  # else submitit warns
                    with self._executor.batch():
                        jobs = [self._executor.submit(fn, *args) for _, fn, args in new]
            except Exception as error:  # sbatch refuses
                for future, _, _ in new:
                    future.set_exception(error)
                continue
            self._jobs += [(future, job) for (future, _, _), job in zip(new, jobs, strict=True)]
            for future, job in list(self._jobs):
                if job.done():
                    self._jobs.remove((future, job))
                    try:
                        future.set_result(job.result())
                    except Exception as failure:  # also of a job whose process was killed and left nothing
                        self._failed = True
                        future.set_exception(failure)
        for _, job in self._jobs:
            job.cancel()
        if not self._failed:  # else its logs say why
            shutil.rmtree(self._executor.folder, ignore_errors=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._ends.set()
        self._follower.join()


def slurm(flags: str) -> Made:
    """Return SLURM with the flags of sbatch in *flags*; where there is none, submitit's local executor."""
    module = _module("slurm", "submitit", "submitit")
    words = shlex.split(flags)
    wrong = [word for word in words if not (word.startswith("--") and "=" in word)]
    if wrong:
        raise UsageError(f"--pool slurm:{brief(flags)}: expected flags of sbatch such as '--partition=a --mem=20G'")
    given = {name.lstrip("-").replace("-", "_"): value for name, _, value in (word.partition("=") for word in words)}
    executor = module.AutoExecutor(folder=tempfile.mkdtemp(prefix="distsim-slurm-", dir=os.getcwd()))
    limit = {} if "time" in given else {"timeout_min": SLURM_MINUTES}
    executor.update_parameters(**limit, slurm_additional_parameters=given)
    return (lambda: _Submitit(executor)), SLURM_WIDTH if executor.cluster == "slurm" else os.cpu_count() or 1
