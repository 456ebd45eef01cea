"""The `[[faults]]` of a scenario file: a table for each kind, and the rule of the simulator that it becomes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from distsim.errors import UsageError
from distsim.sim.faults import corrupt, master_unreachable, slow_storage, store_unreachable
from distsim.sim.faults.fault import Rule
from distsim.sim.faults.links import link_cut, link_flap, link_lossy, link_slow, nic_down, switch_down
from distsim.sim.faults.moment import CallPoint, When
from distsim.sim.faults.ranks import crash, delay, exception, exit, freeze, jitter, straggler
from distsim.text.units import parse_time

__all__ = ["FaultSpec", "Seconds", "Table", "Timed", "quantity"]


def _seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise PydanticCustomError("quantity", "expected a time such as 0.5 (seconds) or '5ms', got a boolean")
    try:
        return parse_time(value)
    except (UsageError, TypeError) as error:
        raise PydanticCustomError("quantity", "{text}", {"text": str(error)}) from None


def _call(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("call", "expected a call such as 'all_reduce #3' or a number")
    try:
        CallPoint.parse(value)
    except UsageError as error:
        raise PydanticCustomError("call", "{text}", {"text": str(error)}) from None
    return value


def quantity(example: str, **number: float) -> WithJsonSchema:
    """What editors are told of a quantity: a number, or text with a unit as in *example*."""
    return WithJsonSchema({"anyOf": [{"type": "number", **number}, {"type": "string", "examples": [example]}]})


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0), quantity("5ms", minimum=0)]
"""Of virtual time: a number of seconds, or text such as "5ms"."""
MoreSeconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0), quantity("5ms", exclusiveMinimum=0)]
"""Above zero."""
Call = Annotated[str | int, BeforeValidator(_call)]
Rank = Annotated[int, Field(ge=0, strict=True)]
Ranks = Annotated[list[Rank], Field(min_length=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class Table(BaseModel):
    """A table of the file: unknown keys are faults, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Timed(Table):
    """When a fault strikes: at a time or at a call, some time after it, and for how long."""

    at_s: Seconds | None = Field(None, description="virtual time at which it strikes (default: from the start)")
    call: Call | None = Field(
        None,
        description="the call at which it strikes: 'all_reduce #3', 'all_reduce #3 on dp', or a rank's n-th",
    )
    after_s: Seconds = Field(0.0, description="strike this long after the time or call")
    for_s: Seconds | None = Field(None, description="how long (default: for good)")

    @model_validator(mode="after")
    def _one_moment(self) -> Timed:
        if self.at_s is not None and self.call is not None:
            raise PydanticCustomError("moment", "expected at_s or call, got both")
        return self

    def when(self) -> When:
        point = None if self.call is None else CallPoint.parse(self.call)
        return When(self.at_s or 0.0, point, self.after_s, self.for_s)

    def rule(self, path: str) -> Rule:
        """The simulator's rule for this table, which stands at *path* in its file."""
        raise NotImplementedError

    def common(self, path: str) -> dict[str, Any]:
        """What every rule has."""
        return {"path": path, "when": self.when()}


class OnLinks(Timed):
    link: str | list[str] = Field(description="'src->dst' as reports name links; * and ? match, a list is several")

    @property
    def links(self) -> tuple[str, ...]:
        return (self.link,) if isinstance(self.link, str) else tuple(self.link)

    def common(self, path: str) -> dict[str, Any]:
        return {**super().common(path), "links": self.links}


class LinkSlow(OnLinks):
    """A link with a fraction of its bandwidth, or a longer latency."""

    what: Literal["link_slow"]
    factor: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="fraction of the bandwidth that is left")
    extra_latency_s: Seconds = Field(0.0, description="what each message takes longer")

    def rule(self, path: str) -> Rule:
        return link_slow.LinkSlow(factor=self.factor, extra_latency_s=self.extra_latency_s, **self.common(path))


class LinkCut(OnLinks):
    """A link over which nothing moves. Between switches the fabric leads its traffic over others, where there are
    any; a NIC's own link has no other. With backend = 'gloo' the hosts that this leaves no way out are cut off for
    real (Linux network namespaces, which take root); so with nic_down and switch_down. at_s then counts from the
    moment all ranks have begun and their hosts' monitors know each other."""

    what: Literal["link_cut"]
    reroute_s: Seconds = Field(
        0.0, description="how long the fabric takes to find another way between its switches, where it has one"
    )

    def rule(self, path: str) -> Rule:
        return link_cut.LinkCut(reroute_s=self.reroute_s, **self.common(path))


class LinkFlap(OnLinks):
    """A link that goes down and comes back, again and again."""

    what: Literal["link_flap"]
    period_s: MoreSeconds = Field(description="from one time that it goes down to the next")
    down_s: MoreSeconds = Field(description="how long it is down each time; shorter than period_s")

    @model_validator(mode="after")
    def _down_within_period(self) -> LinkFlap:
        if self.down_s >= self.period_s:
            told = f"expected down_s below period_s, got {self.down_s:g} and {self.period_s:g}"
            raise PydanticCustomError("flap", "{text}", {"text": told})
        return self

    def rule(self, path: str) -> Rule:
        return link_flap.LinkFlap(period_s=self.period_s, down_s=self.down_s, **self.common(path))


class LinkLossy(OnLinks):
    """A link that loses packets, which are sent again."""

    what: Literal["link_lossy"]
    loss: Fraction = Field(description="fraction of packets lost")
    recovery: Literal["go_back_n", "selective"] = Field(
        "go_back_n",
        description="what is sent again: the whole window (RoCE of old), or the lost packet alone",
    )

    def rule(self, path: str) -> Rule:
        return link_lossy.LinkLossy(loss=self.loss, recovery=self.recovery, **self.common(path))


class NicDown(Timed):
    """A NIC that is down; with a second rail its traffic goes there."""

    what: Literal["nic_down"]
    nic: str = Field(description="such as n0/nic0")
    second_rail: str | None = Field(None, description="the NIC that takes over, such as n0/nic1")
    failover_s: Seconds = Field(0.0, description="how long that takes")

    def rule(self, path: str) -> Rule:
        more = self.common(path)
        return nic_down.NicDown(part=self.nic, detour=self.second_rail, detour_after_s=self.failover_s, **more)


class SwitchDown(Timed):
    """A switch that is down. Where the other switches have a way around it, the fabric takes that."""

    what: Literal["switch_down"]
    switch: str = Field(description="such as leaf0, spine1")
    around: str | None = Field(
        None, description="the switch that takes over its links, also those of NICs (default: what the graph has)"
    )
    reroute_s: Seconds = Field(0.0, description="how long the fabric takes to find it")

    def rule(self, path: str) -> Rule:
        more = self.common(path)
        return switch_down.SwitchDown(part=self.switch, detour=self.around, detour_after_s=self.reroute_s, **more)


class OnRanks(Timed):
    ranks: Ranks = Field(description="which ranks, such as [1, 3]")

    def common(self, path: str) -> dict[str, Any]:
        return {**super().common(path), "ranks": tuple(self.ranks)}


def _some(ranks: list[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(ranks)


class Crash(OnRanks):
    """Ranks killed by a signal."""

    what: Literal["crash"]
    signal: str = Field("SIGKILL", description="such as SIGKILL, SIGSEGV, SIGTERM")

    def rule(self, path: str) -> Rule:
        return crash.Crash(signal=self.signal, **self.common(path))


class Freeze(OnRanks):
    """Ranks stopped (SIGSTOP), for good or for some time."""

    what: Literal["freeze"]

    def rule(self, path: str) -> Rule:
        return freeze.Freeze(**self.common(path))


class Exit(OnRanks):
    """Ranks that leave."""

    what: Literal["exit"]
    code: Annotated[int, Field(ge=0, le=255, strict=True)] = Field(1, description="their exit code")

    def rule(self, path: str) -> Rule:
        return exit.Exit(code=self.code, **self.common(path))


class Raise(OnRanks):
    """Ranks in which an exception is raised."""

    what: Literal["exception"]
    exception: str = Field(
        "RuntimeError",
        description="a name of Python's or torch.distributed's, or with its module: 'torch.cuda.OutOfMemoryError'",
    )
    message: str = Field("injected fault", description="what it says")

    def rule(self, path: str) -> Rule:
        return exception.Raise(exception=self.exception, message=self.message, **self.common(path))


class Delay(OnRanks):
    """Ranks that come late once."""

    what: Literal["delay"]
    delay_s: MoreSeconds = Field(description="by how much")

    def rule(self, path: str) -> Rule:
        return delay.Delay(delay_s=self.delay_s, **self.common(path))


class StragglerSpec(OnRanks):
    """Ranks that are slow all the time."""

    what: Literal["straggler"]
    factor: Annotated[float, Field(ge=1)] = Field(
        1.0, description="their operators, on CPU or GPU, take so many times as long"
    )
    delay_s: Seconds = Field(0.0, description="mean time lost before each call")
    distribution: Literal["constant", "exponential", "uniform", "pareto"] = Field(
        "constant", description="of that time: uniform from 0 to twice the mean, pareto with a long tail"
    )

    def rule(self, path: str) -> Rule:
        return straggler.Straggler(
            factor=self.factor, delay_s=self.delay_s, distribution=self.distribution, **self.common(path)
        )


class JitterSpec(Timed):
    """Pauses of the operating system, in what the host computes and while it launches kernels."""

    what: Literal["jitter"]
    ranks: Ranks | None = Field(None, description="default: all")
    period_s: MoreSeconds = Field(description="there is a pause in every such time")
    pause_s: MoreSeconds = Field(description="how long each takes")
    synchronous: bool = Field(True, description="all ranks pause at the same moments")

    def rule(self, path: str) -> Rule:
        more = {**self.common(path), "ranks": _some(self.ranks)}
        return jitter.Jitter(period_s=self.period_s, pause_s=self.pause_s, synchronous=self.synchronous, **more)


class CorruptSpec(Timed):
    """A bit flipped in what a rank receives."""

    what: Literal["corrupt"]
    rank: Rank = Field(description="who receives it")
    element: Annotated[int, Field(ge=0, strict=True)] = Field(0, description="which number of the tensor, from 0")
    bit: Annotated[int, Field(ge=0, le=127, strict=True)] = Field(0, description="which bit of it, from the lowest")

    def rule(self, path: str) -> Rule:
        return corrupt.Corrupt(rank=self.rank, bit=self.bit, element=self.element, **self.common(path))


class SlowStorageSpec(Timed):
    """File accesses of the program (open, torch.save, torch.load) that take longer."""

    what: Literal["slow_storage"]
    ranks: Ranks | None = Field(None, description="default: all")
    delay_s: MoreSeconds = Field(description="how much longer each takes")
    files: str = Field("*", description="pattern of their paths")
    number: Annotated[int, Field(ge=1, strict=True)] | None = Field(None, description="only the n-th access of a rank")

    def rule(self, path: str) -> Rule:
        more = {**self.common(path), "ranks": _some(self.ranks)}
        return slow_storage.SlowStorage(delay_s=self.delay_s, files=self.files, number=self.number, **more)


class StoreUnreachable(Timed):
    """The store of the rendezvous does not answer."""

    what: Literal["store_unreachable"]
    ranks: Ranks | None = Field(None, description="default: all")

    def rule(self, path: str) -> Rule:
        return store_unreachable.StoreUnreachable(ranks=_some(self.ranks), **self.common(path))


class MasterUnreachable(Timed):
    """The host of rank 0 cannot be reached from the others."""

    what: Literal["master_unreachable"]

    def rule(self, path: str) -> Rule:
        return master_unreachable.MasterUnreachable(**self.common(path))


FaultSpec = Annotated[
    LinkSlow
    | LinkCut
    | LinkFlap
    | LinkLossy
    | NicDown
    | SwitchDown
    | Crash
    | Freeze
    | Exit
    | Raise
    | Delay
    | StragglerSpec
    | JitterSpec
    | CorruptSpec
    | SlowStorageSpec
    | StoreUnreachable
    | MasterUnreachable,
    Field(discriminator="what"),
]
