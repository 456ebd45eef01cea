"""The two arms of a conformance test: real gloo processes, and the simulator.

A body is a plain function `body(rank, world_size)` that uses torch.distributed as any program
does and returns a dict of named values. `gloo(body)` runs it in four real processes, `sim(body)`
in a simulated world of four ranks; both return one plain value per rank, ready to be compared.

gloo kills a process on some mistakes, so every body gets four processes of its own. They are
forked from a server that has imported torch once: about 20 ms each.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from conformance.plain import plain

WORLD_SIZE = 4
NPROC_PER_NODE = 2
TIMEOUT_S = 20.0
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "pytest",
)

Body = Callable[..., Any]
Conform = Callable[..., None]
"""The fixture `conform`: `conform(body, *args)`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of a body that initializes by itself can meet."""

    directory: str
    ports: tuple[int, ...]


class ArmError(AssertionError):
    """A body did not come to its end."""


def own_init(body: Body) -> Body:
    """Mark a body that calls init_process_group itself: it is called `body(rank, world_size, place)`."""
    body.own_init = True  # type: ignore[attr-defined]
    return body


def run_body(body: Body, args: tuple[Any, ...], place: Place, before_the_end: Callable[[], None] = lambda: None) -> Any:
    """What every rank of both arms does."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if getattr(body, "own_init", False):
        return plain(body(rank, world_size, place, *args))
    dist.init_process_group("gloo")
    answer = plain(body(rank, world_size, *args))
    before_the_end()
    dist.destroy_process_group()
    return answer


def sim(body: Body, *args: Any) -> list[Any]:
    """Run the body on four simulated ranks."""
    import distsim

    directory = tempfile.mkdtemp(prefix="conformance-")
    try:
        place = Place(directory, tuple(range(29600, 29608)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = distsim.simulate(
                run_body,
                on="ethernet-cpu:2",
                nproc_per_node=NPROC_PER_NODE,
                args=(body, args, place),
            )
        if outcome.exit_code:
            told = "; ".join(f"{found.kind}: {found.explanation}" for found in outcome.diagnoses)
            raise ArmError(f"{body.__name__} ended with exit code {outcome.exit_code} on sim\n{told}")
        return list(outcome.results)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def gloo(body: Body, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Run the body in four real processes on gloo: once more where gloo itself could not connect them (a listener that
    closes a connection it has just taken, about once in ten thousand groups on a busy machine)."""
    reference = (body.__code__.co_filename, body.__name__)
    try:
        return _processes(reference, args, timeout_s)
    except ArmError as error:
        if "connectFullMesh failed" not in str(error):
            raise
        return _processes(reference, args, timeout_s)


def gloo_script(path: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Run a script in four real processes as torchrun would; what they printed."""
    return "".join(_processes((str(path), None), (), timeout_s))


def _processes(reference: tuple[str, str | None], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
    had_a_method = multiprocessing.get_start_method(allow_none=True) is not None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    directory = tempfile.mkdtemp(prefix="conformance-")
    ports = free_ports(9)
    workers = []
    readers: list[Connection] = []
    try:
        for rank in range(WORLD_SIZE):
            reader, writer = context.Pipe(duplex=False)
            job = (rank, reference, args, Place(directory, ports[1:]), ports[0])
            worker = context.Process(target=_worker, args=(writer, job), daemon=True)
            worker.start()
            writer.close()
            workers.append(worker)
            readers.append(reader)
        return _collect(readers, workers, timeout_s, reference[1] or reference[0])
    finally:
        for worker in workers:
            worker.join(0.0 if worker.is_alive() and worker.exitcode is None else None)
            if worker.is_alive():
                worker.join(2.0)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for reader in readers:
            reader.close()
        shutil.rmtree(directory, ignore_errors=True)
        if not had_a_method:  # starting a process chooses one for the whole of this process
            multiprocessing.set_start_method(None, force=True)


def _collect(readers: list[Connection], workers: list[Any], timeout_s: float, name: str) -> list[Any]:
    """One answer per rank; the first death or the timeout ends the wait for all."""
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) + len(failures) < len(readers):
        waiting = [r for i, r in enumerate(readers) if i not in answers and i not in failures]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [i for i, r in enumerate(readers) if r in waiting]
            failures.update(dict.fromkeys(missing, f"no answer after {timeout_s:g} s"))
        for reader in ready:
            rank = readers.index(reader)  # type: ignore[arg-type]
            try:
                kind, value = readers[rank].recv()
            except EOFError:
                workers[rank].join(5.0)
                code = workers[rank].exitcode
                died = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
                failures[rank] = f"died: {died}"
                continue
            if kind == "answer":
                answers[rank] = value
            else:
                failures[rank] = value
        if failures:  # the others now wait for a rank that is gone: give them a moment to say so
            deadline = min(deadline, time.monotonic() + 5.0)
    if failures:
        ranks: dict[str, list[int]] = {}
        for rank, text in sorted(failures.items()):
            ranks.setdefault("\n".join(text.strip().splitlines()[-12:]), []).append(rank)
        told = "\n".join(f"ranks {who}: {text}" for text, who in ranks.items())
        raise ArmError(f"{name} did not end on gloo\n{told}")
    return [answers[rank] for rank in range(len(readers))]


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that were free a moment ago, below those that the system gives to clients."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            ports += [port] * (port not in ports)
    return tuple(ports)


def _worker(writer: Connection, job: tuple[Any, ...]) -> None:
    """One real rank."""
    rank, (path, name), args, place, port = job
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        LOCAL_RANK=str(rank % NPROC_PER_NODE),
        LOCAL_WORLD_SIZE=str(NPROC_PER_NODE),
        GROUP_RANK=str(rank // NPROC_PER_NODE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        TORCHELASTIC_RUN_ID="conformance",  # both arms are as under torchrun
    )
    try:
        import torch

        torch.set_num_threads(1)
        torch.utils.data.get_worker_info()  # touched, so that it is imported before a body is timed
        warnings.simplefilter("ignore")
        sys.path.insert(0, str(Path(__file__).parent.parent))
        if name is None:
            answer = _run_script(path)
        else:
            answer = run_body(getattr(_load(path), name), args, place, lambda: _meet(place.directory, rank))
        writer.send(("answer", answer))
    except BaseException:
        writer.send(("error", traceback.format_exc()))
    finally:
        writer.close()


def _meet(directory: str, rank: int) -> None:
    """Wait until all have their answers: rank 0 is the store's server and must not leave first."""
    Path(directory, f"done-{rank}").touch()
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if all(Path(directory, f"done-{i}").exists() for i in range(WORLD_SIZE)):
            return
        time.sleep(0.002)


def _load(path: str) -> Any:
    """The module of a body, by its file."""
    spec = importlib.util.spec_from_file_location(f"body_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run_script(path: str) -> str:
    """Run the script as `python path` would and return its output."""
    printed = io.StringIO()
    sys.argv = [path]
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()
