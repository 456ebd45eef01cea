"""Arguments of the marker `ranks`, and the fixtures that describe a rank."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from distsim.options import Silent

TIMEOUT_S = 60.0
HOST_TIMEOUT_S = 10.0
LIMITS = {
    "timeout_s": f"how long a test on several ranks may take, in seconds (default: {TIMEOUT_S:g})",
    "host_timeout_s": "how long a rank may run without a call: on sim without running an operator or an import, on "
    f"gloo outside of torch.distributed while others wait for it; in seconds (default: {HOST_TIMEOUT_S:g})",
}
"""Arguments of the marker whose defaults are ini options: `distsim_timeout_s`, `distsim_host_timeout_s`."""


@dataclass(frozen=True, slots=True)
class WorldFixture:
    """Value of the fixture `world`: the rank on which the body runs."""

    rank: int
    """Global rank."""
    size: int
    """Number of ranks."""
    local_rank: int
    """Rank on its node."""
    on: str
    """`sim` if the body runs simulated, `gloo` if it runs in a real process."""


class PerRank:
    """Placeholder, until the body runs, for a fixture whose value differs between ranks."""

    def __init__(self, name: str) -> None:
        self.__dict__["what"] = name

    def _refuse(self, *_: object) -> Any:
        raise pytest.UsageError(
            f"fixture {self.__dict__['what']!r} was used while another fixture is set up: fixtures are set up once, "
            "for all ranks together; use it in the test's body"
        )

    __index__ = __int__ = __getitem__ = __call__ = __eq__ = __lt__ = __add__ = __mod__ = __bool__ = _refuse
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "<each rank's own>"  # hypothesis shows the arguments of a case

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "hypothesis_")) or name.endswith("_example"):  # it takes a first argument for `self`
            raise AttributeError(name)
        return self._refuse()


class WorldOfAll(PerRank):
    """Placeholder for the fixture `world`; other fixtures may read `results` after the body has run."""

    @property
    def results(self) -> list[Any]:
        """Return values of the body on each rank; None for a rank that failed."""
        returned: list[Any] | None = self.__dict__.get("returned")
        if returned is None:
            raise pytest.UsageError("world.results: there is none before the body has run: ask after `yield`")
        return returned


@dataclass(frozen=True, slots=True)
class NotSent:
    """Entry of `world.results` for a value that a real rank could not send to pytest."""

    why: str


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """The arguments of the marker."""

    n: int
    on: str = "sim"
    cluster: str | None = None
    init: bool = True
    backend: str = "gloo"
    mesh: tuple[int, ...] | None = None
    mesh_dim_names: tuple[str, ...] | None = None
    seed: int = 0
    timeout_s: float = TIMEOUT_S
    host_timeout_s: float = HOST_TIMEOUT_S
    faults: tuple[dict[str, Any], ...] = field(default=())
    guards: tuple[str, ...] = field(default=())
    silent: Silent | None = None
    explore: str | int | None = None
    faults_explored: tuple[str, ...] = field(default=())
    expect_fault: Any = None

    @classmethod
    def read(cls, marker: pytest.Mark, n: Any, on: Any, config: pytest.Config) -> PluginOptions:
        """Return the checked arguments of the marker, or raise pytest.UsageError."""
        name, known = marker.name, set(cls.__slots__)
        given = dict(marker.kwargs)
        if len(marker.args) > 1 or (marker.args and "n" in given):
            given_text = ", ".join([*map(repr, marker.args), *(f"{k}={v!r}" for k, v in given.items())])
            raise pytest.UsageError(f"{name}: expected one number of ranks, got {name}({given_text})")
        unknown = sorted(set(given) - known)
        if unknown:
            raise pytest.UsageError(f"{name}: expected arguments {', '.join(cls.__slots__)}, got {unknown[0]}")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise pytest.UsageError(f"{name}: expected a number of ranks, 1 or more, got {n!r}")
        if on not in ("sim", "gloo"):
            raise pytest.UsageError(f"{name}: expected on='sim' or on='gloo', got {on!r}")
        given.update(n=n, on=on)
        _check_exploration(name, marker, given)
        for key in LIMITS:
            if key in given:
                given[key] = positive(given[key], f"{name}: {key}")
            elif value := config.getini(f"distsim_{key}"):
                given[key] = positive(value, f"pytest's configuration: distsim_{key}")
        for key, (right, expectation) in _RIGHT.items():
            if given.get(key) is not None and not right(given[key]):
                raise pytest.UsageError(f"{name}: {key}: expected {expectation}, got {given[key]!r}")
        for key in ("mesh", "mesh_dim_names", "faults", "guards"):
            if given.get(key) is not None:
                given[key] = tuple(given[key])
        shape = given.get("mesh")
        if shape is not None and math.prod(shape) != n:
            raise pytest.UsageError(f"{name}({n}): mesh={shape}: a mesh over {math.prod(shape)} ranks, expected {n}")
        names = given.get("mesh_dim_names")
        if names is not None and len(names) != len(shape or (n,)):
            raise pytest.UsageError(
                f"{name}: mesh_dim_names: expected a name for each dimension of mesh={shape or (n,)}, got {names}"
            )
        return cls(**given)

    def patience_note(self, away_s: float) -> str:
        """Return a note about the limit that ended a rank which made no call for *away_s* seconds."""
        name, value = "host_timeout_s", self.host_timeout_s
        may = f"a rank may compute for host_timeout_s={value:g} seconds without a call"
        if away_s < value:
            name, value = "timeout_s", self.timeout_s
            may = f"a rank may compute for {away_s:g} seconds without a call, because of timeout_s={value:g}"
        more = f"{name}=... in the marker, or distsim_{name} in pytest's configuration"
        return f"{may}; if the work takes longer: {more}"

    def values(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the test with the values of this rank."""
        seen = dict(kwargs)
        for name, value in kwargs.items():
            if isinstance(value, PerRank):
                seen[name] = self._value(value.__dict__["what"])
        return seen

    def _value(self, name: str) -> Any:
        if name == "rank":
            return int(os.environ["RANK"])
        if name == "world":
            return WorldFixture(int(os.environ["RANK"]), self.n, int(os.environ["LOCAL_RANK"]), self.on)
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", self.mesh or (self.n,), mesh_dim_names=self.mesh_dim_names)


def _check_exploration(name: str, marker: pytest.Mark, given: dict[str, Any]) -> None:
    """Check what the marker says about orders.

    Raises:
        pytest.UsageError: It is not a budget, or the test runs on gloo only.
    """
    from distsim.errors import UsageError

    if given.get("explore") is None:
        if given.get("faults_explored"):
            raise pytest.UsageError(f"{name}: faults_explored: expected explore='all' beside it")
    expect = given.get("expect_fault")
    if expect is not None and not (given.get("faults_explored") and (expect == "error" or callable(expect))):
        raise pytest.UsageError(
            f"{name}: expect_fault: expected 'error' or a function of the outcome, with faults_explored beside it, "
            f"got {expect!r}"
        )
    if given.get("explore") is None:
        return
    arms = marker.kwargs.get("on", "sim")
    if "sim" not in arms:
        raise pytest.UsageError(f"{name}: explore: expected on='sim' or on=['sim', 'gloo'], got on={arms!r}")
    from distsim.scenario.explore.budget import Budget, check_kinds

    try:
        Budget.read(given["explore"])
        given["faults_explored"] = check_kinds(given.get("faults_explored", ()))
    except UsageError as error:
        raise pytest.UsageError(f"{name}: explore: {error}") from None


def positive(value: Any, name: str) -> float:
    """Return *value* as a number of seconds, or raise pytest.UsageError about *name*."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise pytest.UsageError(f"{name}: expected a number of seconds above 0, got {value!r}")
    return seconds


def _several(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(isinstance(one, kind) for one in value)


_RIGHT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cluster": (lambda value: isinstance(value, str), "a cluster's name or the path of its file"),
    "init": (lambda value: isinstance(value, bool), "True or False"),
    "backend": (lambda value: isinstance(value, str), "a backend's name"),
    "mesh": (_several(int), "the sizes of its dimensions, such as (2, 4)"),
    "mesh_dim_names": (_several(str), "a list of names"),
    "seed": (lambda value: isinstance(value, int) and value >= 0, "a whole number, 0 or more"),
    "faults": (_several(dict), "a list of tables, such as [{'what': 'crash', 'ranks': [1]}]"),
    "guards": (_several(str), "a list of names"),
    "silent": (lambda value: value in get_args(Silent), "off, watch or strict"),
}
"""Argument -> (check, description of allowed values)."""
