"""Installation of the torch hooks that report events to the collector of the running rank.

Functions for which torch has no hooks (losses, dropout, clipping, data loaders) are replaced by wrappers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from distsim.debug.diagnosis.silent.collect.collector import Collector
from distsim.debug.diagnosis.silent.collect.sketch import array_of
from distsim.debug.diagnosis.silent.facts import ClipFact, DropoutFact, EpochFact, GroupFact, LossFact, TrainingPhase
from distsim.torch_compat.compiler import scripted_as

Current = Callable[[], "Collector | None"]
"""Function that returns the collector of the running rank, or None if the rank has none."""

_SCALES = tuple(
    f"{name}Backward"
    for name in ("Mul", "Div", "ToCopy", "View", "Squeeze", "Mean", "Sum", "Index", "MaskedSelect", "Slice", "Select")
)
"""Autograd nodes that may lie between a loss and the tensor on which `backward` is called, because they only scale
it, or leave out targets.
"""
ALIKE = 1e-3
"""Relative difference up to which the targets of an unreduced loss weigh equally."""
MERSENNE_BYTES = 24 + 624 * 8
"""Bytes of a CPU generator's state that are hashed: its seed, its position, and the words of the Mersenne Twister.
The bytes after them are padding and a cached normal number.
"""
OTHER_LOSSES = ("kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
"""Loss functions whose targets are not counted. If a step calls one, the weights of its targets are unknown."""


@contextlib.contextmanager
def global_hooks(current: Current) -> Iterator[None]:
    """Return a context in which torch reports forward passes, optimizer steps and new DDP models.

    DDP's constructor is not wrapped, so that its warnings point to the program's line.
    """

    def enter(module: Any, args: Any) -> None:
        if is_compiling():  # traced: the compiled code calls no hook of a module inside of it
            return
        collector = current()
        if collector is not None:
            collector.hear(collector.enter_module, module, args, sys._getframe(1))

    def leave(module: Any, args: Any, output: Any) -> None:
        if is_compiling():
            return
        collector = current()
        if collector is not None:
            collector.hear(collector.leave_module, module, args)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        collector = current()
        if collector is not None:
            has_closure = any(callable(one) for one in (*args[1:], *kwargs.values()))
            collector.hear(collector.before_step, optimizer, has_closure, sys._getframe(1))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        collector = current()
        if collector is not None:
            collector.hear(collector.after_step, optimizer)

    def registered(module: Any, name: str, part: Any) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            collector = current()
            if collector is not None:
                collector.hear(collector.new_ddp, module)

    handles = [
        register_module_module_registration_hook(registered),
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    try:
        with _heard_from_local(current):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _heard_from_local(current: Current) -> Iterator[None]:
    """Return a context in which DTensor.from_local reports to the collectors, once the program has made a mesh.

    It is wrapped as late as that because the import of DTensor takes a third of a second.
    """
    original, whole = DeviceMesh.__init__, contextlib.ExitStack()

    @functools.wraps(original)
    def on_new_mesh(mesh: Any, /, *args: Any, **kwargs: Any) -> None:  # DeviceMesh has an argument `mesh`
        original(mesh, *args, **kwargs)
        tensors = sys.modules.get("torch.distributed.tensor")
        if tensors is not None and not hasattr(tensors.DTensor.from_local, "__wrapped__"):
            holder, name, wrapper = _before(tensors.DTensor, "from_local", _from_local, current)
            whole.callback(setattr, holder, name, holder.__dict__[name])
            setattr(holder, name, staticmethod(wrapper))

    DeviceMesh.__init__ = on_new_mesh
    try:
        with whole:
            yield
    finally:
        DeviceMesh.__init__ = original


def function_patches(current: Current) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return (holder, attribute, wrapper) for each function to replace. A wrapper calls torch's function and reports
    to the collector of its rank.
    """
    of_losses = torch.nn.functional
    clips = [(holder, "clip_grad_norm_") for holder in (torch.nn.utils, torch.nn.utils.clip_grad)]
    return [
        _after(DistributedDataParallel, "register_comm_hook", _hooked_ddp, current),
        *(_after(of_losses, name, _classified, current) for name in ("cross_entropy", "nll_loss")),
        _after(of_losses, "mse_loss", _regressed, current),
        *(_after(of_losses, name, _lost, current) for name in OTHER_LOSSES),
        _before(torch.autograd, "backward", _begins_backward, current),
        _before(of_losses, "dropout", _drops, current),
        *(_after(holder, name, _clipped, current) for holder, name in clips),
        _before(DataLoader, "__iter__", _iterates, current),
        *(_after(holder, "new_group", _groups, current) for holder in (torch.distributed, distributed_c10d)),
    ]


def _after(holder: Any, name: str, hear: Callable[..., None], current: Current) -> tuple[Any, str, Callable[..., Any]]:
    """Return a patch that calls `hear(collector, result, *args, **kwargs)` after each call of the function."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        if is_compiling():  # traced: only what torch does may be in the graph
            return answer
        collector = current()
        if collector is not None:
            collector.hear(hear, collector, answer, *args, **kwargs)
        return answer

    return holder, name, scripted_as(original, call)


def _before(holder: Any, name: str, hear: Callable[..., None], current: Current) -> tuple[Any, str, Callable[..., Any]]:
    """Return a patch that calls `hear(collector, *args, **kwargs)` before each call of the function."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        collector = None if is_compiling() else current()
        if collector is not None:
            collector.hear(hear, collector, *args, **kwargs)
        return original(*args, **kwargs)

    return holder, name, scripted_as(original, call)


def _hooked_ddp(collector: Collector, answer: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
    collector.compress(ddp)


# -- losses


def _classified(
    collector: Collector,
    loss: Any,
    source: Any = None,
    target: Any = None,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    *args: Any,
    **kwargs: Any,
) -> None:
    values = None if target is None else collector.read(target)
    known = values is not None and weight is None and size_average is None and reduce is None
    if values is None or not known:
        _follow(collector, loss, LossFact("none", 0))
    elif values.dtype.kind == "f":  # probabilities of classes
        _follow(collector, loss, LossFact(reduction, int(values.shape[0])))
    else:
        _follow(collector, loss, LossFact(reduction, int((values != ignore_index).sum()), counts_tokens=True))


def _regressed(
    collector: Collector, loss: Any, source: Any = None, target: Any = None, *args: Any, **kwargs: Any
) -> None:
    reduction = kwargs.get("reduction", "mean")
    plain = not args and set(kwargs) <= {"reduction"} and target is not None
    _follow(collector, loss, LossFact(reduction if plain else "none", int(target.numel()) if plain else 0))


def _lost(collector: Collector, loss: Any, *args: Any, **kwargs: Any) -> None:
    _follow(collector, loss, LossFact("none", 0))


def _follow(collector: Collector, loss: Any, fact: LossFact) -> None:
    """Record *fact*, and set its weight to the gradient that later arrives at *loss*."""
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad or not collector.keeps(collector.window.losses):
        return
    fact.site = collector.here("loss")
    collector.window.losses.append(fact)
    if loss.dim():
        fact.reduction = "none"
    if fact.reduction not in ("mean", "sum") and not (loss.dim() and fact.counts_tokens):
        return
    collector.roots[loss.grad_fn] = fact

    def weigh(gradient: Any) -> None:
        values = collector.read(gradient)
        if values is None:
            return
        if loss.dim():  # a loss of each target: a mask may have left some out, and any function have reduced the rest
            values = values[values != 0.0]
            if values.size and values.max() - values.min() <= ALIKE * abs(values).max():
                fact.reduction, fact.targets, fact.weight = "sum", int(values.size), float(values.mean())
        elif values.size == 1:
            fact.weight = (fact.weight or 0.0) + float(values.reshape(-1)[0])

    loss.register_hook(lambda gradient: collector.hear(weigh, gradient))


def _begins_backward(collector: Collector, tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """Handle a call of `backward`. Record an unknown loss unless it starts at a recorded loss or a multiple of one."""
    node = getattr(tensors, "grad_fn", None)
    while node is not None and node not in collector.roots and node.name().startswith(_SCALES):
        behind = [edge[0] for edge in node.next_functions if edge[0] is not None]
        node = behind[0] if len(behind) == 1 else None
    if node is None or node not in collector.roots:
        if collector.keeps(collector.window.losses):
            collector.window.losses.append(LossFact("none", 0))
    collector.roots.clear()


# -- random state, clipping, data


def _drops(
    collector: Collector, source: Any = None, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any
) -> None:
    if not (training and 0.0 < p < 1.0 and collector.looks_closely and collector.keeps(collector.window.dropouts)):
        return
    vector = collector.sketch(source)
    state = array_of(torch.default_generator.get_state()) if getattr(source, "is_cpu", False) else None
    if vector is not None and state is not None:
        site = collector.here("dropout")
        fact = DropoutFact(zlib.crc32(state[:MERSENNE_BYTES].tobytes()), vector, tuple(source.shape), site)
        collector.window.dropouts.append(fact)


def _clipped(
    collector: Collector, total: Any, parameters: Any = None, max_norm: Any = None, *args: Any, **kwargs: Any
) -> None:
    if not collector.keeps(collector.window.clips):
        return
    values = collector.read(total)
    is_plain = type(total) is torch.Tensor
    norm = None if values is None or values.size != 1 else float(values.reshape(-1)[0])
    site = collector.here("clip")
    collector.window.clips.append(ClipFact(float(max_norm), norm, is_plain, site))


def _iterates(collector: Collector, loader: Any) -> None:
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or type(sampler) is BatchSampler:  # another one may shuffle by itself
        sampler = getattr(loader if sampler is None else sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) and collector.keeps(collector.window.epochs):
        fact = EpochFact(
            collector.number_of(sampler), int(sampler.epoch), collector.here("epoch"), bool(sampler.shuffle)
        )
        fact.replicas, fact.part = int(sampler.num_replicas), int(sampler.rank)
        fact.size, fact.seed = len(sampler.dataset), int(sampler.seed)
        collector.window.epochs.append(fact)


# -- groups and DTensors


def _groups(collector: Collector, group: Any, ranks: Any = None, *args: Any, **kwargs: Any) -> None:
    if ranks is not None and kwargs.get("sort_ranks", True) and isinstance(group, ProcessGroup):
        given = tuple(map(int, ranks))
        if given != tuple(sorted(given)) and collector.keeps(collector.sorted_groups):
            collector.sorted_groups.append((weakref.ref(group), GroupFact(given, collector.here("group"))))


def _from_local(
    collector: Collector,
    part: Any,
    mesh: Any = None,
    placements: Any = None,
    *args: Any,
    shape: Any = None,
    **kwargs: Any,
) -> None:
    if mesh is None or collector.pass_ is TrainingPhase.BACKWARD:
        return
    shards = [None if one.is_replicate() else one for one in placements or ()]
    if not any(placement.is_partial() for placement in placements or ()):
        collector.add_part(part, mesh, shards or [None] * mesh.ndim, shape)
