"""Process-wide settings of Python and torch, turned by one rank only; logging; warnings."""

from __future__ import annotations

import builtins
import faulthandler
import gc
import logging
import os
import resource
import sys
import warnings
from pathlib import Path

import pytest
import torch
from sim.running import HEAD, Scripts, ranks


def test_torch_settings_per_rank(script: Scripts) -> None:
    """dtype, determinism, anomaly, threads, print options, default device: only where they were set."""
    ran = script(
        HEAD
        + """
def show():
    print(torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(),
          torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.tensor([1.23456]), torch.zeros(1).device)
if rank == 1:
    torch.set_default_dtype(torch.float64); torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True); torch.set_num_threads(3); torch.set_float32_matmul_precision("medium")
    torch.set_printoptions(precision=1); torch.set_default_device("meta")
dist.barrier()
torch.get_default_dtype() and show() if rank == 0 else print(torch.get_default_dtype(), torch.get_num_threads())
dist.barrier()
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == ["torch.float32 False False 1 highest tensor([1.2346]) cpu"]
    assert ran.of(1) == ["torch.float64 3"]
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert "1.2346" in str(torch.tensor([1.23456]))


def test_grad_modes_per_rank(script: Scripts) -> None:
    """no_grad, inference_mode and autocast of one rank while others run."""
    ran = script(
        HEAD
        + """
with torch.set_grad_enabled(rank == 0):
    dist.barrier()
    print(torch.is_grad_enabled())
with torch.inference_mode(rank == 0):
    t = torch.ones(2)
    dist.all_reduce(t)
    print(torch.is_inference_mode_enabled(), t.is_inference(), t.tolist())
with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank == 0):
    dist.barrier()
    print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
"""
    )
    assert ran.of(0) == ["True", "True True [2.0, 2.0]", "torch.bfloat16"]
    assert ran.of(1) == ["False", "False False [2.0, 2.0]", "torch.float32"]


def test_print_silenced_on_other_ranks(script: Scripts) -> None:
    """`builtins.print = nothing` on all ranks but the first, as ImageNet's and DETR's scripts do it."""
    real = builtins.print
    ran = script(
        HEAD
        + """
import builtins
import faulthandler
if rank != 0:
    builtins.print = lambda *args, **kwargs: None
dist.barrier()
print("hello")
dist.barrier()
"""
    )
    assert ran.out == "[0] hello\n"
    assert builtins.print is real


def test_warning_filters_per_rank(script: Scripts) -> None:
    """simplefilter, catch_warnings and showwarning of one rank."""
    before = list(warnings.filters)
    ran = script(
        HEAD
        + """
import warnings
warnings.showwarning = lambda message, *rest: print("told", message)
warnings.simplefilter("ignore" if rank == 0 else "always")
dist.barrier()
warnings.warn("careful")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    dist.barrier()
    warnings.warn("kept")
    dist.barrier()
print(len(caught))
if rank == 1:
    warnings.showwarning = lambda message, *rest: print("shown", message)
dist.barrier()
warnings.warn("last")
"""
    )
    assert ran.of(0) == ["1"]
    assert ran.of(1) == ["told careful", "1", "shown last"]
    assert list(warnings.filters) == before


def test_logging_per_rank(script: Scripts) -> None:
    """basicConfig, levels, handlers and named loggers of a rank are its own."""
    root = (logging.root.level, list(logging.root.handlers), set(logging.Logger.manager.loggerDict))
    ran = script(
        HEAD
        + """
import logging
level = logging.INFO if rank == 0 else logging.WARNING
logging.basicConfig(level=level, format=f"r{rank} %(message)s", stream=sys.stdout, force=True)
log = logging.getLogger("mine")
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter(f"own{rank} %(name)s %(message)s"))
log.addHandler(handler)
logging.getLogger("torch.distributed").setLevel(logging.ERROR if rank == 0 else logging.DEBUG)
dist.barrier()
logging.info("info"); logging.warning("warning"); log.error("error")
nn = logging.getLogger("torch.distributed.nn")
print(logging.getLogger("torch.distributed").level, nn.isEnabledFor(logging.INFO))
logging.disable(logging.CRITICAL) if rank == 0 else None
dist.barrier()
log.error("second")
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == ["r0 info", "r0 warning", "own0 mine error", "r0 error", "40 False"]
    assert ran.of(1) == ["r1 warning", "own1 mine error", "r1 error", "10 True", "own1 mine second", "r1 second"]
    assert (logging.root.level, list(logging.root.handlers)) == root[:2]
    assert "mine" not in logging.Logger.manager.loggerDict


def test_dict_config_per_rank(script: Scripts, tmp_path: Path) -> None:
    """logging.config.dictConfig in every rank closes nobody else's handlers."""
    ran = script(
        HEAD
        + """
import logging, logging.config
path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"log{rank}.txt")
file = {"class": "logging.FileHandler", "filename": path, "mode": "w"}
root = {"handlers": ["file"], "level": "INFO"}
logging.config.dictConfig({"version": 1, "handlers": {"file": file}, "root": root})
dist.barrier()
logging.info("from %d", rank)
"""
    )
    assert ran.outcome.exit_code == 0
    for rank in range(2):
        assert (tmp_path / f"log{rank}.txt").read_text() == f"from {rank}\n"


def test_hooks_per_rank(script: Scripts) -> None:
    """sys.excepthook and sys.stdout that a rank replaces stay its own."""
    hook, out = sys.excepthook, sys.stdout
    ran = script(
        HEAD
        + """
class Loud:
    def __init__(self, stream): self.stream = stream
    def write(self, text): return self.stream.write(text.upper())
    def flush(self): self.stream.flush()
if rank == 0:
    sys.stdout = Loud(sys.stdout)
    sys.excepthook = lambda *args: None
dist.barrier()
print("quiet", sys.excepthook is sys.__excepthook__)
"""
    )
    assert ran.of(0) == ["QUIET FALSE"]
    assert len(ran.of(1)) == 1
    assert ran.of(1)[0].startswith("quiet ")
    assert (sys.excepthook, sys.stdout) == (hook, out)


def test_interpreter_settings_per_rank(script: Scripts) -> None:
    """umask, garbage collection, recursion limit and their like, as one rank sets them, are its own."""
    before = (gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval())
    mask = os.umask(0o022)
    os.umask(mask)
    ran = script(
        HEAD
        + """
import gc, socket
finder = type("Finder", (), {"find_spec": staticmethod(lambda *given: None)})
def state():
    mask = os.umask(0); os.umask(mask)
    return [gc.isenabled(), gc.get_threshold()[0], sys.getrecursionlimit(), oct(mask), socket.getdefaulttimeout(),
            sys.get_int_max_str_digits(), len(sys.meta_path), sys.displayhook is sys.__displayhook__]
os.umask(0o022); gc.enable(); gc.set_threshold(700, 10, 10); sys.setrecursionlimit(1000)
dist.barrier()
first = state()
dist.barrier()
if rank == 1:
    gc.disable(); gc.set_threshold(50); sys.setrecursionlimit(5000); os.umask(0o077); socket.setdefaulttimeout(3)
    sys.set_int_max_str_digits(0); sys.meta_path.append(finder); sys.displayhook = print
dist.barrier()
print([new if new == old else (old, new) for old, new in zip(first, state())])
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    found = [eval(ran.of(rank)[0]) for rank in range(2)]
    assert found[0] == [True, 700, 1000, "0o22", None, 4300, found[0][6], True]
    count = found[0][6]
    assert found[1] == [
        (True, False), (700, 50), (1000, 5000), ("0o22", "0o77"), (None, 3), (4300, 0), (count, count + 1),
        (True, False),
    ]  # fmt: skip
    assert (gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval()) == before
    assert os.umask(mask) == mask
    assert not any(getattr(finder, "__name__", "") == "Finder" for finder in sys.meta_path)


def test_what_holds_for_the_whole_process_is_set_without_effect(
    script: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers that end the process, limits, cores: a rank reads what it set, and the simulating process is as it was."""
    armed: list[object] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **kwargs: armed.append(args))
    before = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    ran = script(
        "import faulthandler, os, resource\n"
        "faulthandler.dump_traceback_later(1, exit=True)\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64 + int(os.environ['RANK']), hard))\n"
        "cores = min(os.sched_getaffinity(0))\n"
        "os.sched_setaffinity(0, {cores})\n"
        "os.nice(3)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.sched_getaffinity(0) == {cores})\n"
    )
    assert (ran.of(0), ran.of(1)) == (["64 True"], ["65 True"])
    assert armed == []
    after = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    assert after == before


@pytest.mark.parametrize(
    "way",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cudnn.allow_tf32 = False",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "torch.set_float32_matmul_precision('high')",
    ],
)
def test_precision_of_products_is_a_ranks_own(script: Scripts, way: str) -> None:
    """Whichever of torch's ways rank 1 takes, rank 0 and the surrounding program see nothing of it."""

    def seen() -> tuple[str, str, str, str]:
        cuda, cudnn, cpu = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul
        return cuda.fp32_precision, cudnn.fp32_precision, cpu.fp32_precision, torch.get_float32_matmul_precision()

    before = seen()
    ran = script(
        HEAD
        + f"""
def seen():
    cuda, cudnn, cpu = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul
    return cuda.fp32_precision, cudnn.fp32_precision, cpu.fp32_precision
if rank == 1:
    own = seen()
    {way}
    assert seen() != own
dist.barrier()
if rank == 0:
    print(*seen())
"""
    )
    assert ran.outcome.exit_code == 0, ran.outcome.failures
    assert ran.of(0) == [" ".join(before[:3])]
    assert seen() == before


def test_a_rank_may_set_its_locale() -> None:
    """torch.utils.collect_env asks for it: what a switch holds is read by the function of before."""
    import locale

    outcome = ranks(lambda: locale.setlocale(locale.LC_ALL, "C"), 2)
    assert outcome.results == ["C", "C"]
