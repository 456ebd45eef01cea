"""What a simulation costs whatever it simulates is paid once a process; what has changed since is seen all the same."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import time
import tomllib
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.utils.data

import distsim
from distsim.cluster.files.load import preset_text
from distsim.sim.isolation.modules import patch_table
from distsim.sim.isolation.wraps import resembling


def _slept_s(module: ModuleType) -> float:
    """Virtual seconds that the module's own name for `time.sleep` takes a rank."""

    def body() -> float:
        before = time.monotonic()
        module.sleep(0.25)
        return time.monotonic() - before

    return float(distsim.simulate(body, nproc_per_node=1).results[0])


def test_a_second_run_looks_nothing_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No preset is parsed, no signature worked out a second time."""
    for _ in range(2):  # the first imports some more
        distsim.simulate(lambda: None, nproc_per_node=1)
    again: list[str] = []
    read, ask = tomllib.loads, inspect.signature

    def parsed(text: str, /, **how: Any) -> dict[str, Any]:
        again.append(text[:40])
        return read(text, **how)

    def asked(function: Any, **how: Any) -> inspect.Signature:
        if isinstance(function, BuiltinFunctionType):
            again.append(repr(function))
        return ask(function, **how)

    monkeypatch.setattr(tomllib, "loads", parsed)
    monkeypatch.setattr(inspect, "signature", asked)
    distsim.simulate(lambda: None, nproc_per_node=1)
    assert again == []


def test_a_module_imported_since_tells_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that comes after the first run, one that replaces it, and one that grows, ask the clock."""
    distsim.simulate(lambda: None, nproc_per_node=1)
    first, second = ModuleType("came_later"), ModuleType("came_later")
    vars(first)["sleep"] = time.sleep
    monkeypatch.setitem(sys.modules, "came_later", first)
    assert _slept_s(first) == pytest.approx(0.25)
    monkeypatch.setitem(sys.modules, "came_later", second)
    distsim.simulate(lambda: None, nproc_per_node=1)
    vars(second)["sleep"] = time.sleep
    assert _slept_s(second) == pytest.approx(0.25)
    assert vars(second)["sleep"] is time.sleep


def test_a_module_that_grew_while_a_simulation_ran_tells_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a module that we write to, too, between our own two: it is seen by the next run."""
    module, real = ModuleType("came_later"), [time.perf_counter]
    vars(module)["sleep"] = time.sleep
    monkeypatch.setitem(sys.modules, "came_later", module)
    for _ in range(2):  # the second looks only where somebody wrote
        distsim.simulate(lambda: None, nproc_per_node=1)

    def grow() -> None:
        vars(module)["perf_counter"] = real[0]

    def slept_s() -> float:
        before = vars(module)["perf_counter"]()
        module.sleep(0.25)
        return float(vars(module)["perf_counter"]() - before)

    distsim.simulate(grow, nproc_per_node=1)
    assert distsim.simulate(slept_s, nproc_per_node=1).results == [pytest.approx(0.25)]
    assert vars(module)["perf_counter"] is real[0]


def test_a_logger_made_since_answers_each_rank_for_itself() -> None:
    """Loggers remember what they are enabled for; one that all ranks share must not, whenever it was made."""

    def body(name: str) -> bool:
        rank = int(os.environ["RANK"])
        if rank == 0:
            logging.disable(logging.ERROR)
        time.sleep(0.1 * (2 - rank))  # rank 1 asks first
        return logging.getLogger(name).isEnabledFor(logging.ERROR)

    for name in ("made_before_the_first", "made_since"):
        logging.getLogger(name)
        assert distsim.simulate(body, args=(name,), nproc_per_node=2).results == [False, True]


def test_the_logger_of_a_module_that_all_share_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was its first importer's: to other ranks, and in the next run, its name meant a logger that nobody uses."""
    name = "torch.distributed.elastic.timer.local_timer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(logging.Logger.manager.loggerDict, name, raising=False)

    def body() -> bool:
        module = importlib.import_module(name)
        logging.getLogger(name).setLevel(logging.DEBUG if os.environ["RANK"] != "0" else logging.ERROR)
        time.sleep(1)
        return logging.getLogger(name) is module.logger and module.logger.isEnabledFor(logging.INFO)

    assert [distsim.simulate(body, nproc_per_node=3).results for _ in range(2)] == [[False, True, True]] * 2


def test_what_a_dying_thread_lets_go_of_in_torch_is_kept() -> None:
    """torch's C++ holds this logger once for each thread and drops it without Python's lock: as the last reference, or
    beside another rank's count, that ended the whole process (once in 600 runs with DTensors)."""

    def body() -> int:
        return sys.getrefcount(logging.getLogger("torch.distributed.tensor._dispatch"))

    assert min(distsim.simulate(body, nproc_per_node=2).results) > 5_000


def test_a_name_that_means_something_else_by_now_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test has put its own function in place of `sleep`, ranks call that."""
    module = ModuleType("came_later")
    vars(module)["sleep"] = time.sleep
    monkeypatch.setitem(sys.modules, "came_later", module)
    assert _slept_s(module) == pytest.approx(0.25)
    vars(module)["sleep"] = lambda seconds: None
    assert _slept_s(module) < 0.01


def test_a_cluster_file_that_changed_is_read_again(tmp_path: Path) -> None:
    """Between two runs a cluster file grows from one node to two."""
    file = tmp_path / "cluster.toml"
    file.write_text('base = "dgx-h100"\nnodes = 1\n')
    assert distsim.simulate(lambda: None, on=str(file)).world_size == 8
    file.write_text('base = "dgx-h100"\nnodes = 2\n')
    assert distsim.simulate(lambda: None, on=str(file)).world_size == 16


def test_clusters_of_one_preset_share_nothing_that_changes() -> None:
    """What one run's cluster is changed to, the next run's is not."""
    one, other = (distsim.cluster.load_cluster("dgx-h100") for _ in range(2))
    assert one.spec is not None
    assert one.links is not other.links
    one.calibration["gloo_all_reduce_launch_s"] = 1.0  # type: ignore[index]
    one.spec.node.gpu.flops.clear()  # type: ignore[union-attr]
    third = distsim.cluster.load_cluster("dgx-h100")
    assert "gloo_all_reduce_launch_s" not in third.calibration
    assert third.to_toml() == other.to_toml()
    assert preset_text("dgx-h100").startswith("# ")


def test_what_is_led_elsewhere_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hundred replacements; and made anew where somebody has exchanged what one of them stands for."""

    def system() -> str:
        return str(distsim.simulate(lambda: os.uname()[0], nproc_per_node=1).results[0])

    real, made = os.uname, []
    assert [system(), system()] == [real()[0]] * 2
    with monkeypatch.context() as patch:
        patch.setattr(patch_table, "resembling", lambda of, value: made.append(value) or resembling(of, value))
        system()
        assert not made
        patch.setattr(os, "uname", lambda: os.uname_result(("theirs", *real()[1:])))
        assert system() == "theirs"
        assert len(made) > 300
    assert os.uname is real
    assert system() == real()[0]


def test_a_name_that_has_its_old_meaning_again_is_led_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may replace its module's `sleep` for one simulation, and not for the next."""
    naps = ModuleType("naps_of_this_test")
    naps.__file__ = __file__
    monkeypatch.setitem(sys.modules, naps.__name__, naps)

    def napped() -> float:
        before = time.monotonic()
        vars(naps)["sleep"](0.01)
        return time.monotonic() - before

    for sleep, least_s in ((lambda _: None, 0.0), (time.sleep, 0.01), (lambda _: None, 0.0)):
        vars(naps)["sleep"] = sleep
        (took_s,) = distsim.simulate(napped, nproc_per_node=1).results
        assert least_s <= took_s < least_s + 0.005


def test_a_class_that_a_test_has_changed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a class held when the last simulation ended is not taken for what it holds now."""
    called: list[str] = []

    def made() -> None:
        torch.utils.data.DataLoader([1])

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        called.append("theirs")
        real(self, *args, **kwargs)

    loader = torch.utils.data.DataLoader
    real = loader.__init__
    for _ in range(2):
        distsim.simulate(made, nproc_per_node=1)
        assert loader.__init__ is real
    with monkeypatch.context() as patch:
        patch.setattr(loader, "__init__", theirs)
        for runs in (1, 2):
            distsim.simulate(made, nproc_per_node=1)
            assert len(called) == runs
            assert loader.__init__ is theirs
    distsim.simulate(made, nproc_per_node=1)
    assert len(called) == 2
    assert loader.__init__ is real


def test_what_a_rank_leaves_in_a_class_is_gone_in_the_next_run() -> None:
    """Its own, which no other run finds; a test's, which all find from then on."""
    kind = torch.optim.SGD

    def mark(by: str) -> list[object]:
        found = [getattr(kind, name, None) for name in ("of_a_rank", "of_a_test")]
        kind.of_a_rank = by  # type: ignore[attr-defined]
        return found

    try:
        for run in range(4):
            if run == 2:
                kind.of_a_test = "all"  # type: ignore[attr-defined]
            outcome = distsim.simulate(mark, args=(f"run {run}",), nproc_per_node=2)
            assert outcome.results == [[None, "all" if run >= 2 else None]] * 2
            assert not hasattr(kind, "of_a_rank")
    finally:
        del kind.of_a_test  # type: ignore[attr-defined]


def test_what_a_rank_leaves_among_the_modules_is_gone_in_the_next_run() -> None:
    """Runs begin with one copy of `sys.modules`; a rank's own module is in none but its own."""

    def body(put: bool) -> list[bool]:
        found = ["of_one_rank" in sys.modules, "of_a_test" in sys.modules]
        if put:
            sys.modules["of_one_rank"] = ModuleType("of_one_rank")
        return found

    for put in (False, True, True, False):
        assert distsim.simulate(body, args=(put,), nproc_per_node=2).results == [[False, False]] * 2
    sys.modules["of_a_test"] = ModuleType("of_a_test")
    try:
        assert distsim.simulate(body, args=(True,), nproc_per_node=2).results == [[False, True]] * 2
        assert "of_a_test" in sys.modules
    finally:
        del sys.modules["of_a_test"]
    assert distsim.simulate(body, args=(False,), nproc_per_node=2).results == [[False, False]] * 2


def test_modules_are_plain_again_and_their_class_is_counted() -> None:
    """Torch's modules tell of writes while a simulation runs; one that a test has given a class of its own keeps it."""

    class Lazy(ModuleType):
        """What a program makes of a module."""

    def kinds() -> set[str]:
        return {type(module).__name__ for module in (torch, torch.optim, torch.nn)}

    distsim.simulate(lambda: None, nproc_per_node=1)
    watched = distsim.simulate(lambda: type(torch.nn), nproc_per_node=1).results[0]
    held = sys.getrefcount(watched)
    for _ in range(3):
        assert distsim.simulate(kinds, nproc_per_node=1).results == [{watched.__name__}]
        assert kinds() == {"module"}
        assert sys.getrefcount(watched) == held
    torch.optim.__class__ = Lazy  # type: ignore[assignment]
    try:
        distsim.simulate(lambda: None, nproc_per_node=1)
        assert type(torch.nn) is ModuleType
        assert sys.getrefcount(watched) == held
    finally:
        torch.optim.__class__ = ModuleType
