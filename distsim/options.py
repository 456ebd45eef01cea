"""Options of a simulated run: name, type, default and meaning of each.

They are flags of `distsim run` (`add_flags`), keys of a scenario file (scenario/file/schema.py), and keyword arguments
of `distsim.simulate`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from distsim.errors import UsageError
from distsim.text.distributions import UNIFORM, lengths_of, routing_of
from distsim.text.units import seconds

if TYPE_CHECKING:
    from distsim.cluster import Cluster

Data = Literal["shapes", "real"]
Fidelity = Literal["fluid", "message"]
Silent = Literal["off", "watch", "strict"]


def _about(meaning: str, kind: Any = str, metavar: str | None = None) -> dict[str, Any]:
    return {"meaning": meaning, "kind": kind, "metavar": metavar}


@dataclass(kw_only=True)
class RunOptions:
    """Options of a simulated run that do not depend on the program."""

    on: str | Cluster = field(
        default="dgx-h100:1",
        metadata=_about(
            "cluster: a preset with its number of nodes (dgx-h100:4), or a cluster file (.toml)", metavar="CLUSTER"
        ),
    )
    nnodes: int | None = field(
        default=None, metadata=_about("number of nodes to use (default: all nodes of the cluster)", int, "N")
    )
    nproc_per_node: int | None = field(
        default=None, metadata=_about("ranks on each node (default: one on each GPU, or on each CPU socket)", int, "N")
    )
    seed: int = field(default=0, metadata=_about("random seed; the same seed gives the same run", int, "N"))
    data: Data = field(
        default="shapes",
        metadata=_about(
            "values of tensors on simulated GPUs. shapes: only values that come from the host are known (seeds, "
            "labels, splits, pickled objects). real: all values are computed on the CPU, so losses are correct, and "
            "the run takes the time and memory of the CPU",
            Data,
        ),
    )
    silent: Silent | None = field(
        default=None,
        metadata=_about(
            "look for silent wrong results: replicas that drift apart, gradients that no call reduced, the same batch "
            "on all ranks (docs/silent.md). watch: report them after the verdict, and compare tensors on simulated "
            "GPUs by how they are computed; strict: exit with code 5 if one is an error (default: watch for tensors "
            "with real values in simulations of up to 64 ranks, off in real jobs)",
            Silent,
        ),
    )
    placeholder: float = field(
        default=1.0,
        metadata=_about(
            "value returned for an unknown scalar on a simulated GPU, such as loss.item(); unknown integers are 0. The "
            "report counts these reads by line, and names conditions that depend on one",
            float,
            "VALUE",
        ),
    )
    routing: str = field(
        default=UNIFORM,
        metadata=_about(
            "how tokens choose among the experts of a router whose scores have no values: uniform, zipf:1.2 (the share "
            "of the n-th expert is n ** -1.2), measured:FILE (rows of each expert, one number a line) or worst (all "
            "choose the same experts)",
            metavar="DISTRIBUTION",
        ),
    )
    lengths: str | None = field(
        default=None,
        metadata=_about(
            "lengths of sequences in batches of token ids without values, in tokens: lognormal:MEAN:SIGMA, or a file "
            "with one length a line (default: no token is padding or cut off)",
            metavar="FILE|DISTRIBUTION",
        ),
    )
    fuse: bool = field(
        default=True,
        metadata=_about(
            "price functions under torch.compile as fused kernels, although they run eagerly (--no-fuse: price each "
            "operator by itself)"
        ),
    )
    strict_kernels: bool = field(
        default=False,
        metadata=_about(
            "refuse kernels of Triton or of CUDA source without a distsim.kernel_cost (default: price them by the "
            "bytes of their tensors, with a note in the report)"
        ),
    )
    gpu_libraries: str | None = field(
        default=None,
        metadata=_about(
            "GPU libraries that the simulated machine has, such as transformer_engine,flash_attn, or none: their "
            "imports succeed, with replacements, and imports of others fail (default: a library is there if it is "
            "installed, or if the program does not catch its ImportError)",
            metavar="NAME,...",
        ),
    )
    fidelity: Fidelity = field(
        default="fluid",
        metadata=_about(
            "network model. fluid: flows that share links; message: every message, which is exact and slow", Fidelity
        ),
    )
    algo: str | None = field(
        default=None,
        metadata=_about("algorithm for all collectives (ring, tree, ...), as NCCL_ALGO", metavar="NAME"),
    )
    proto: str | None = field(
        default=None,
        metadata=_about("protocol for all collectives (LL, LL128, Simple), as NCCL_PROTO", metavar="NAME"),
    )
    nccl_version: str | None = field(
        default=None, metadata=_about("release of NCCL whose choices of algorithm and protocol are used", metavar="X.Y")
    )
    host_timeout_s: float | None = field(
        default=None,
        metadata=_about(
            "wall time after which a rank that makes no call counts as stuck on its host", seconds, "SECONDS"
        ),
    )
    tokens_per_step: float | None = field(
        default=None,
        metadata=_about(
            "tokens in a training step over all ranks, for tokens/s (default: the tokens looked up in the embedding)",
            int,
            "N",
        ),
    )
    log_dir: str | None = field(
        default=None, metadata=_about("folder for the output of the ranks, one file for each", metavar="DIR")
    )
    trace: bool = field(
        default=False, metadata=_about("keep every call and operator for a trace, instead of the last calls only")
    )

    def __post_init__(self) -> None:
        for name, option in _FIELDS.items():
            words = get_args(option.metadata["kind"])
            value = getattr(self, name)
            if words and value not in words and not (value is None and option.default is None):
                raise UsageError(f"{name}: expected {' or '.join(words)}, got {value!r}")
        if self.host_timeout_s is not None and not 0.0 <= self.host_timeout_s < float("inf"):
            raise UsageError(f"host_timeout_s: expected seconds, 0 or more, got {self.host_timeout_s}")
        routing_of(self.routing)
        if self.lengths is not None:
            lengths_of(self.lengths)


_FIELDS = {option.name: option for option in fields(RunOptions)}


def meaning(name: str) -> str:
    """Return the description of the option *name*."""
    return str(_FIELDS[name].metadata["meaning"])


def default_of(name: str) -> Any:
    """Return the default of the option *name*."""
    return _FIELDS[name].default


def options_of(source: object) -> dict[str, Any]:
    """Return the options that *source* has as attributes (parsed flags, or the keys of a scenario)."""
    return {name: getattr(source, name) for name in _FIELDS if hasattr(source, name)}


def add_flags(group: Any, *names: str) -> None:
    """Add a flag to the parser *group* for each option in *names*: `--host-timeout` for `host_timeout_s`."""
    for name in names:
        flag, text, default = "--" + name.removesuffix("_s").replace("_", "-"), meaning(name), default_of(name)
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction if default else "store_true"
            group.add_argument(flag, dest=name, action=action, default=default, help=text)
            continue
        if default is not None:
            text += f" (default: {default})"
        kind, metavar = _FIELDS[name].metadata["kind"], _FIELDS[name].metadata["metavar"]
        if words := get_args(kind):
            group.add_argument(flag, dest=name, choices=words, default=default, help=text)
        else:
            group.add_argument(flag, dest=name, type=kind, metavar=metavar, default=default, help=text)
