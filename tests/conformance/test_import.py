"""`import distsim as dist`: one rule for the names that distsim and torch.distributed both have."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed
import torch.distributed.debug as torch_debug
import torch.distributed.run as torchrun
from sim.running import ranks

import distsim as dist

SHARED = {"debug", "run"}
"""Names of both. A new one needs the same care as `debug`: torch's public names through distsim's object."""


def test_a_name_of_both_is_distsims_and_has_torchs_names() -> None:
    """The sub-package keeps its own names and answers torch's; every other name is torch's own object."""
    of_torch = {*dir(torch.distributed), *(one.name for one in pkgutil.iter_modules(torch.distributed.__path__))}
    of_distsim = {*dist._OWN, *(one.name for one in pkgutil.iter_modules(dist.__path__))}
    assert of_torch & of_distsim == SHARED
    assert isinstance(dist.debug, ModuleType)
    assert dist.debug.__name__ == "distsim.debug"
    assert torch.distributed.debug is torch_debug
    assert set(torch_debug.__all__).isdisjoint(dist.debug.__all__)
    for name in torch_debug.__all__:
        assert getattr(dist.debug, name) is getattr(torch_debug, name)
    others = of_torch & set(vars(torch.distributed)) - of_distsim
    assert [n for n in others if n[:2] != "__" and getattr(dist, n) is not getattr(torch.distributed, n)] == []
    assert dist.run.main is torchrun.main, "a function with the names of torch's module"
    with pytest.raises(AttributeError, match="no attribute 'start_debug_servers'"):
        dist.debug.start_debug_servers  # noqa: B018


def test_the_rule_holds_in_a_rank() -> None:
    """A simulated rank imports distsim as dist, and finds both."""

    def body() -> tuple[str, str]:
        import distsim as dist

        return dist.debug.install.__module__, dist.debug.start_debug_server.__module__

    assert ranks(body, 1).results == [("distsim.debug", "torch.distributed.debug")]


@pytest.mark.slow
def test_a_simulation_leaves_no_abort_behind(tmp_path: Path) -> None:
    """torch's handlers of its debug server are freed after Python has ended, and a simulation gave them a dict."""
    program = tmp_path / "program.py"
    program.write_text("import torch.distributed.debug")
    flags = ["run", "--on", "ethernet-cpu:1", "--nproc-per-node", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "distsim", *flags, program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
