"""Every command that reads a file of the user, run through `main` in this process, with files that it is glad of.

A command is right to answer with its exit code, or to refuse in one readable message; anything else is a break: the
exit code of an error of distsim, a letter that a terminal would obey, or more work than a small file is worth.

Not here, because they execute what they are given: `run` with a hostile script, `shell`, `fits`, `tune` and `equal`.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from distsim.cli import main
from distsim.errors import UsageError
from tests.fuzz import readers
from tests.fuzz.mutate import SPOILED
from tests.fuzz.readers import Reader
from tests.house.tree import ROOT

__all__ = ["COMMANDS", "InternalError", "spoiled"]

CPU_S = 20.0
"""Of one command."""
INTERNAL = 70
CODES = {0, 1, 2, 3, 4, 5}


class InternalError(Exception):
    """A command ended with an exit code or an output that it must not have."""


class _NoTerminal(io.StringIO):
    def fileno(self) -> int:
        raise io.UnsupportedOperation


def run(folder: Path, words: tuple[str, ...]) -> None:
    """Run `distsim WORDS` in *folder*; UsageError with what it said where it refused."""
    out, error = _NoTerminal(), _NoTerminal()
    here, environ = os.getcwd(), dict(os.environ)
    os.environ |= {"DISTSIM_TRACEBACK": "1", "PATH": "", "XDG_CACHE_HOME": str(_cache()), "COLUMNS": "100"}
    if (gpus := sys.modules.get("distsim.kernels.gpu_file")) is not None:
        gpus.read_gpu.cache_clear()  # a file of the same name was another one
    try:
        os.chdir(folder)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main(list(words))
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(environ)
    if code not in CODES:
        raise InternalError(f"exit code {code}: {error.getvalue()[-6000:]}")
    if obeyed := re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", out.getvalue() + error.getvalue()):
        raise InternalError(f"{obeyed[0]!r} in the output of distsim {' '.join(words)}")
    if code == 2:
        raise UsageError(error.getvalue() or out.getvalue())  # a diagnosis that is inconclusive is an answer


@cache
def _cache() -> Path:
    return Path(tempfile.mkdtemp(prefix="distsim-fuzz-cache-"))


def _command(
    words: str, seeds: Callable[[], dict[str, bytes]], fuzzed: str = "*", weight: int = 10, name: str = ""
) -> Reader:
    """`distsim WORDS` beside the files of *seeds*."""
    split = tuple(words.split())
    title = f"distsim {name or words.partition(' --')[0]}"
    return Reader(title, seeds, lambda folder: run(folder, split), fuzzed, weight, CPU_S, spoils=True)


def spoiled(command: Reader, kind: str) -> dict[str, Any]:
    """The files of *command*, of which each that would be changed is no such file."""
    files: dict[str, Any] = dict(command.seeds())
    for name in readers.fuzzed_names(command):
        files[name] = SPOILED[kind]
    return files


# Seeds ---------------------------------------------------------------------------------------------------


@cache
def _ended_rings() -> dict[str, bytes]:
    """Rings of a process that has ended, or `watch` would wait for it."""
    code = "import pickle, sys; from tests.fuzz.readers import rings; sys.stdout.buffer.write(pickle.dumps(rings()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return dict(pickle.loads(done.stdout))


def _records() -> dict[str, bytes]:
    return {**_ended_rings(), **readers.beside()}


@cache
def _facts() -> dict[str, bytes]:
    from distsim.debug.diagnosis.silent.facts import ParameterFact
    from distsim.debug.diagnosis.silent.facts_file import FactsWriter
    from tests.silent.test_facts_file import full_step, full_window

    files = _ended_rings()
    with tempfile.TemporaryDirectory() as folder:
        for ring in files:
            writer = FactsWriter(Path(folder) / ring.replace(".ring", ".silent"))
            writer.add([ParameterFact("w", (4, 4), "net", True, (0, 1), (0,), (), True, False)], full_step())
            writer.add_rest(full_window())
            writer.close()
        return {**files, **{path.name: path.read_bytes() for path in Path(folder).iterdir()}}


@cache
def _report() -> dict[str, bytes]:
    """Of a simulation that hangs, with times, links and a diagnosis."""
    program = (
        "import torch, torch.distributed as dist\ndist.init_process_group()\nx = torch.ones(4)\ndist.all_reduce(x)\n"
    )
    program += "if dist.get_rank():\n    dist.barrier()\n"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prog.py").write_text(program)
        command = "run --on ethernet-cpu:1 --nproc-per-node 2 --report report.json prog.py"
        with contextlib.suppress(UsageError):
            run(Path(folder), tuple(command.split()))
        return {"report.json": (Path(folder) / "report.json").read_bytes()}


def _diagnosed() -> dict[str, bytes]:
    return {"report.json": readers.beside()["verdict.job.json"]}


def _with_program(seeds: Callable[[], dict[str, bytes]]) -> Callable[[], dict[str, bytes]]:
    return lambda: {
        **seeds(),
        "prog.py": b"import torch.distributed as dist\ndist.init_process_group()\ndist.barrier()\n",
    }


def _own_gpu() -> dict[str, bytes]:
    from distsim.kernels.gpu_file import gpu_folder

    cluster = b'base = "dgx-a100"\nname = "mine"\n[node.gpu]\nmodel = "mine.toml"\n'
    program = b"import torch\nx = torch.ones(64, 64, device='cuda', dtype=torch.bfloat16)\nx @ x\n"
    return {"made.toml": cluster, "mine.toml": (gpu_folder() / "a100.toml").read_bytes(), "prog.py": program}


def _hosts() -> dict[str, bytes]:
    return {"hosts": b"# the nodes\nn1\nuser@n2.example\n[::1]\n"}


def _hostfile() -> dict[str, bytes]:
    return _with_program(lambda: {"hosts": b"n1 slots=2\nn2 slots=2\n"})()


def _baseline() -> dict[str, bytes]:
    scenario = b'schema = "distsim.scenario/1"\nteaches = "x"\nprogram = "prog.py:step"\non = "ethernet-cpu:1"\n'
    scenario += b'nproc_per_node = 2\n[expect]\nkind = "healthy"\n[expect.step_time]\nband = 0.1\n'
    program = b"import torch, torch.distributed as dist\ndef step():\n    dist.all_reduce(torch.ones(4))\n"
    return {"one.toml": scenario, "prog.py": program, "one.baseline.json": b'{"step_time_s": 0.001}'}


def _kept_point() -> dict[str, bytes]:
    return {**_baseline(), "prog.py": b"def step():\n    pass\n"}


_OF_CLUSTERS = [
    ("made.toml", readers.toml),
    ("based.toml", readers.based_toml),
    ("made.json", readers.node_link),
    ("made.xml", readers.xml),
    ("made.yml", readers.astra),
]
_RANKS = "--nnodes 1 --nproc-per-node 2"

COMMANDS = [
    *(_command(f"topo show {file}", seeds, weight=20) for file, seeds in _OF_CLUSTERS),
    _command("topo show made.toml --toml", readers.toml, weight=5, name="topo show --toml"),
    _command("topo show made.json --node-link out.json", readers.node_link, weight=5, name="topo show --node-link"),
    *(
        _command(f"bench all_reduce -b 8 -e 1M -f 32 --on {file}", seeds, weight=10, name=f"bench --on {file}")
        for file, seeds in _OF_CLUSTERS
    ),
    *(
        _command(f"run {_RANKS} --on {file} prog.py", _with_program(seeds), file, weight=4, name=f"run --on {file}")
        for file, seeds in _OF_CLUSTERS
    ),
    _command(f"run {_RANKS} --on made.toml prog.py", _own_gpu, "mine.toml", weight=6, name="run with a GPU file"),
    _command(
        "run --on dgx-a100:2 -- deepspeed --hostfile hosts prog.py", _hostfile, "hosts", 2, name="run -- deepspeed"
    ),
    _command("diagnose . --report r.out --html p.html", _ended_rings, "*.ring", 20, name="diagnose rings"),
    _command("diagnose .", _records, "*.json", 12, name="diagnose beside rings"),
    _command("diagnose .", _records, "*.stacks", 3, name="diagnose stacks"),
    _command("diagnose .", _facts, "*.silent", 10, name="diagnose facts"),
    _command("diagnose . --report r.out", readers.json_dumps, "dump_*", 12, name="diagnose JSON dumps"),
    _command("diagnose .", readers.pickles(2), "dump_*", 12, name="diagnose pickled dumps"),
    _command("watch .", _ended_rings, "*.ring", 6, name="watch rings"),
    _command("watch . --metrics job.prom", _records, "verdict.job.json", 12, name="watch --metrics"),
    _command("watch . --html p.html", _records, "*.json", 4, name="watch --html"),
    _command("scenario from . -o made.toml --no-shrink", _ended_rings, "*.ring", 4, name="scenario from rings"),
    _command("scenario from . -o made.toml --no-shrink", readers.json_dumps, "dump_*", 4, name="scenario from dumps"),
    _command("scenario new made.toml --program prog.py", readers.scenario, "prog.py", 2, name="scenario new"),
    _command("scenario run one.toml", readers.scenario, "one.toml", 10),
    _command("scenario run one.toml", _baseline, "one.baseline.json", 3, name="scenario run with a baseline"),
    _command("html report.json", _report, weight=20),
    _command("html report.json", _diagnosed, weight=6, name="html of a diagnosis"),
    _command("attach --hosts hosts", _hosts, weight=6, name="attach --hosts"),
    _command("validate --from .", readers.tables, "*.csv", 6, name="validate --from"),
    _command("calibrate --from .", readers.tables, "*.csv", 3, name="calibrate --from tables"),
    _command("calibrate --from . --like dgx-h100", readers.logs, "*.log", 4, name="calibrate --from logs"),
]
"""All of them."""
