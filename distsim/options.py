"""The options of a simulated run, each once: its name, type, default and meaning.

`distsim run` makes flags of them (`add_flags`), a scenario file has them as keys (scenario/file/schema.py), and
`distsim.simulate` as keyword arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from distsim.errors import UsageError

if TYPE_CHECKING:
    from distsim.cluster import Cluster

__all__ = ["Data", "Fidelity", "RunOptions", "Silent", "add_flags", "default_of", "meaning", "options_of"]

Data = Literal["shapes", "real"]
Fidelity = Literal["fluid", "message"]
Silent = Literal["off", "watch", "strict"]


def _about(meaning: str, kind: Any = str, metavar: str | None = None) -> dict[str, Any]:
    return {"meaning": meaning, "kind": kind, "metavar": metavar}


@dataclass(kw_only=True)
class RunOptions:
    """How a program is simulated, whatever the program."""

    on: str | Cluster = field(
        default="dgx-h100:1",
        metadata=_about("a preset with its number of nodes (dgx-h100:4), or a cluster file (.toml)", metavar="CLUSTER"),
    )
    nnodes: int | None = field(
        default=None, metadata=_about("nodes of the cluster that are used (default: all)", int, "N")
    )
    nproc_per_node: int | None = field(
        default=None, metadata=_about("ranks on each node (default: one a GPU, or a socket)", int, "N")
    )
    seed: int = field(
        default=0, metadata=_about("seed of everything random; the same seed gives the same run", int, "N")
    )
    data: Data = field(
        default="shapes",
        metadata=_about(
            "what is known of the values of tensors on simulated GPUs. shapes: only those that come from the host "
            "(seeds, labels, splits, pickled objects); real: all are computed on the CPU, so losses are true, it takes "
            "as long and as much memory as there, and the host waits for a collective before it computes on",
            Data,
        ),
    )
    silent: Silent | None = field(
        default=None,
        metadata=_about(
            "look for silent wrong results where values are real: replicas that drift apart, gradients that no call "
            "reduced, one batch on all ranks (docs/silent.md). watch reports them after the verdict; strict makes an "
            "error among them exit code 5 (default: watch in a simulation of up to 64 ranks, off in a real job)",
            Silent,
        ),
    )
    placeholder: float = field(
        default=1.0,
        metadata=_about(
            "what an unknown number on a simulated GPU reads as, say loss.item(); the report counts these reads by "
            "line and names the conditions that depend on one; integers read as 0",
            float,
            "VALUE",
        ),
    )
    fuse: bool = field(
        default=False,
        metadata=_about(
            "price what torch.compile is given as the compiler's fused kernels; it runs eagerly all the same (default: "
            "as it runs, operator by operator)"
        ),
    )
    strict_kernels: bool = field(
        default=False,
        metadata=_about(
            "refuse a Triton kernel that distsim.kernel_cost has not been told of (default: price it by the bytes of "
            "its tensors, and say so in the report)"
        ),
    )
    fidelity: Fidelity = field(
        default="fluid",
        metadata=_about(
            "model of the network: fluid flows that share links, or every message by itself, exact and slow", Fidelity
        ),
    )
    algo: str | None = field(
        default=None,
        metadata=_about("one algorithm for all collectives (ring, tree, ...), as NCCL_ALGO", metavar="NAME"),
    )
    proto: str | None = field(
        default=None,
        metadata=_about("one protocol for all collectives (LL, LL128, Simple), as NCCL_PROTO", metavar="NAME"),
    )
    nccl_version: str | None = field(
        default=None, metadata=_about("release of NCCL whose choice of algorithms is followed", metavar="X.Y")
    )
    host_timeout_s: float | None = field(
        default=None,
        metadata=_about(
            "wall time a rank may compute between two calls before it counts as stuck on the host", float, "SECONDS"
        ),
    )
    tokens_per_step: float | None = field(
        default=None,
        metadata=_about(
            "tokens of a training step, all ranks together, for tokens/s (default: those looked up in the embedding)",
            int,
            "N",
        ),
    )
    log_dir: str | None = field(
        default=None, metadata=_about("folder for what the ranks print, one file a rank", metavar="DIR")
    )
    trace: bool = field(
        default=False, metadata=_about("keep every call and every operator for a trace, not the last calls alone")
    )

    def __post_init__(self) -> None:
        for name, option in _FIELDS.items():
            words = get_args(option.metadata["kind"])
            value = getattr(self, name)
            if words and value not in words and not (value is None and option.default is None):
                raise UsageError(f"{name}: expected {' or '.join(words)}, got {value!r}")


_FIELDS = {option.name: option for option in fields(RunOptions)}


def meaning(name: str) -> str:
    """The sentence that says what the option *name* does."""
    return str(_FIELDS[name].metadata["meaning"])


def default_of(name: str) -> Any:
    """The default of the option *name*."""
    return _FIELDS[name].default


def options_of(source: object) -> dict[str, Any]:
    """The options that *source* has as attributes: parsed flags, the keys of a scenario."""
    return {name: getattr(source, name) for name in _FIELDS if hasattr(source, name)}


def add_flags(group: Any, *names: str) -> None:
    """Add to *group* of a parser a flag for each option in *names*: `--host-timeout` for `host_timeout_s`."""
    for name in names:
        flag, text, default = "--" + name.removesuffix("_s").replace("_", "-"), meaning(name), default_of(name)
        if default is False:
            group.add_argument(flag, dest=name, action="store_true", help=text)
            continue
        if default is not None:
            text += f" (default: {default})"
        kind, metavar = _FIELDS[name].metadata["kind"], _FIELDS[name].metadata["metavar"]
        if words := get_args(kind):
            group.add_argument(flag, dest=name, choices=words, default=default, help=text)
        else:
            group.add_argument(flag, dest=name, type=kind, metavar=metavar, default=default, help=text)
