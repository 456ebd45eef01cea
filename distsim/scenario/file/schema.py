"""Schema of a scenario file: a program, its cluster, its faults, and its expectations.

json_schema.py makes the JSON schema for editors from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from distsim.debug.diagnosis.silent.finding import SilentKind
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.options import Data, Fidelity, Silent, default_of, meaning
from distsim.scenario.file.fault_schema import FaultSpec, FileTable, Rank, Seconds, quantity
from distsim.text.units import parse_bandwidth, parse_memory

__all__ = ["CallSpec", "ExpectSpec", "LimitsSpec", "ScenarioSpec", "StepTimeSpec"]

KINDS = tuple(kind.value for kind in Kind)
SILENT_KINDS = ("none", *(kind.value for kind in SilentKind))


def _bandwidth(value: Any) -> float:
    try:
        return parse_bandwidth(value)
    except (UsageError, TypeError) as error:
        raise PydanticCustomError("quantity", "{text}", {"text": str(error)}) from None


def _memory(value: Any) -> int:
    try:
        return parse_memory(value)
    except (UsageError, TypeError) as error:
        raise PydanticCustomError("quantity", "{text}", {"text": str(error)}) from None


Bandwidth = Annotated[float, BeforeValidator(_bandwidth), quantity("300GB/s", exclusiveMinimum=0)]
Memory = Annotated[int, BeforeValidator(_memory), quantity("512MiB", exclusiveMinimum=0)]
Count = Annotated[int, Field(ge=1, strict=True)]
RankOrAll = Annotated[str, Field(pattern=r"^(all|\d+)$")]


def _option(name: str) -> Any:
    return Field(default_of(name), description=meaning(name))


class CallSpec(FileTable):
    """A call as reports name it: `all_reduce #3`."""

    op: str | None = Field(None, description="the operation: all_reduce, send, ...")
    seq: Count | None = Field(None, description="its number in its group, from 1: the 3 of all_reduce #3")


class StepTimeSpec(FileTable):
    """The time of one step against what it was when the baseline was written."""

    band: Annotated[float, Field(gt=0, lt=1)] = Field(0.05, description="how much it may differ, as a fraction")
    line: str | None = Field(
        None, description="marker of a call made once a step; without it the whole run is the step"
    )


class LimitsSpec(FileTable):
    """Limits that end a program which does not end by itself."""

    virtual_time_s: Seconds | None = Field(86_400.0, description="virtual time (default: a day)")
    wall_time_s: Annotated[float, Field(gt=0)] = Field(60.0, description="of this machine's time")
    events: Count | None = Field(20_000_000, description="simulated events")
    host_timeout_s: Annotated[float, Field(gt=0)] = Field(
        30.0, description="wall time after which a rank that computes without a sign of life is stuck"
    )


class ExpectSpec(FileTable):
    """Expected outcome. Every given key is checked."""

    kind: Literal[KINDS] = Field(  # type: ignore[valid-type]
        "healthy",
        description="of the first diagnosis; healthy: exit code 0 and nothing but stragglers to say",
    )
    culprits: list[Rank] | None = Field(None, description="the ranks at fault, ascending")
    victims: list[Rank] | None = Field(None, description="the ranks that wait for them, ascending")
    group: str | None = Field(None, description="description or name of the group")
    call: CallSpec | None = Field(None, description="the call that the diagnosis is about")
    cycle: list[Rank] | None = Field(None, description="the ranks of a circle of waits, in its order")
    pair: Annotated[list[Rank], Field(min_length=2, max_length=2)] | None = Field(
        None, description="sender and receiver"
    )
    line: str | None = Field(
        None, description="a culprit is at a line of the program that ends like this ('# <- culprit')"
    )
    stuck_line: str | None = Field(None, description="a rank that waits is at a line that ends like this")
    explanation: str | None = Field(None, description="a part of the explanation")
    exit_code: Annotated[int, Field(ge=0, le=255, strict=True)] | None = Field(
        None, description="0 finished, 1 raised, 3 hang, 4 inconsistent calls"
    )
    output: list[str] | None = Field(None, description="lines that some rank prints, in any order")
    prints: dict[RankOrAll, list[str]] | None = Field(None, description="rank or all: lines it prints, in this order")
    results: dict[RankOrAll, Any] | None = Field(None, description="rank or all: what the function returned")
    step_time: StepTimeSpec | None = Field(None, description="the time of a step, against the stored baseline")
    virtual_time_below_s: Seconds | None = Field(None, description="the whole run takes less virtual time")
    memory_below: Memory | None = Field(
        None,
        description="'512MiB' or bytes: the most that the storages of one rank's CPU tensors take together; each "
        "counts once however many views it has, whole (also what a slice keeps alive), from the first operator that "
        "meets it until it is freed. Parameters, gradients, activations, optimizer states and DDP's and FSDP's "
        "buffers count; scratch space inside operators and what is no strided tensor (NumPy, Python objects) do not. "
        "What only waits for Python's garbage collector adds a sixteenth at most",
    )
    busbw_above: dict[str, Bandwidth] | None = Field(None, description="operation: bus bandwidth, as '300GB/s'")
    utilisation_below: dict[str, Annotated[float, Field(gt=0, le=1)]] | None = Field(
        None, description="pattern of links: fraction of their bandwidth, on average over the run"
    )

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers_as_ranks(cls, data: Any) -> Any:
        """TOML keys are text anyway; a table from Python may have numbers."""
        if isinstance(data, dict):
            for key in ("prints", "results"):
                if isinstance(data.get(key), dict):
                    data = {**data, key: {str(rank): value for rank, value in data[key].items()}}
        return data


class ScenarioSpec(FileTable):
    """One scenario."""

    schema_: Literal["distsim.scenario/1"] = Field(
        "distsim.scenario/1", alias="schema", description="the version of this format; it grows by new keys only"
    )
    teaches: str | None = Field(None, description="one sentence for the index")
    program: Annotated[str, Field(min_length=1)] = Field(
        description="script.py beside the file, script.py:function or module:function"
    )
    args: list[str] = Field(default_factory=list, description="the script's, or the function's")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables of every rank")
    on: str = Field(default_of("on"), description="a cluster: preset:nodes, or a cluster file beside this one")
    nnodes: Count | None = _option("nnodes")
    nproc_per_node: Count | None = _option("nproc_per_node")
    backend: Literal["sim", "gloo"] = Field("sim", description="simulated, or for real on gloo")
    seed: Annotated[int, Field(ge=0, strict=True)] = _option("seed")
    schedule: str | None = Field(None, description="as `distsim scenario run --explore` prints it")
    data: Data = _option("data")
    placeholder: float = _option("placeholder")
    fuse: bool = _option("fuse")
    strict_kernels: bool = _option("strict_kernels")
    silent: Silent | None = _option("silent")
    silent_allow: list[str] = Field(
        default_factory=list, description="KIND:TENSOR of silent findings that are known to be right"
    )
    expect_silent: Literal[SILENT_KINDS] | list[Literal[SILENT_KINDS]] | None = Field(  # type: ignore[valid-type]
        None,
        description="the kinds of silent findings, errors and warnings, that come of the run, or 'none' "
        "(default: not checked; an error is exit code 5 with silent = 'strict')",
    )
    fidelity: Fidelity = _option("fidelity")
    algo: str | None = _option("algo")
    proto: str | None = _option("proto")
    guards: list[Literal["nan", "buffers", "payloads"]] = Field(
        default_factory=list,
        description="look for NaN in inputs, for buffers written to while in flight, for corrupted payloads",
    )
    slow: bool = Field(False, description="takes over two seconds (deselect with -k 'not slow')")
    faults: list[FaultSpec] = Field(default_factory=list, description="what goes wrong, where, when, for how long")
    limits: LimitsSpec = Field(LimitsSpec.model_validate({}), description=LimitsSpec.__doc__)
    expect: ExpectSpec = Field(ExpectSpec.model_validate({}), description=ExpectSpec.__doc__)
