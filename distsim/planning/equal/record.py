"""The tensors of a simulated run, rank by rank in the order in which they came.

What modules put out, the gradients of that, gradients of parameters as the optimizer got them, parameters after the
step: by hooks of torch, with no change of the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distsim.debug.diagnosis.silent.collect.sketch import local_part, tensors_in
from distsim.debug.messages import site_text
from distsim.debug.records.frames import program_frames, steps
from distsim.torch_compat.groups import CURRENT_GRAPH_TASK_ID

Reader = Callable[[Any], "NDArray[Any] | None"]
MOST_BYTES = 4 << 30
"""Maximum bytes of tensors that one run keeps."""
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts of names that wrappers of a model add."""
ROUNDING = {torch.float64: 2.0**-52, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
FLOAT32_ROUNDING = 1.2e-7
"""Relative size of the change with which the second layout is run again (silent.md, section 5)."""
_backward: Callable[[], int] = CURRENT_GRAPH_TASK_ID.get(lambda: -1)


class TensorKey(NamedTuple):
    """One tensor of one rank's run. *kind*: start, input, output, output_gradient, gradient, parameter."""

    step: int
    kind: str
    root: int
    """Number of the call of the model within this step."""
    name: str
    """Name of the module or parameter, without the names of wrappers."""
    call: int
    """The number of the module's call within the model's."""
    part: int
    """Index among several tensors of one output."""


@dataclass
class RecordedTensor:
    """A recorded tensor: where it was created, and its values."""

    site: str
    load: Callable[[], NDArray[Any]]


@dataclass
class RecordedRun:
    """One layout's run: per rank its tensors in their order."""

    ranks: dict[int, dict[TensorKey, RecordedTensor]]
    unreadable: dict[str, str] = field(default_factory=dict)
    """Names of the parameters whose values could not be read, with their kind."""
    classes: dict[str, str] = field(default_factory=dict)
    """Class names of modules, by name."""


class TensorRecorder:
    """Records one rank."""

    def __init__(
        self,
        rank: int,
        steps: int,
        read: Reader,
        start: Mapping[str, NDArray[Any]],
        perturbed: bool,
        renamed: Mapping[str, str],
        world_size: int,
    ) -> None:
        self.rank, self.steps, self.read, self.world_size = rank, steps, read, world_size
        self.refusal = ""
        """Why it is not recorded any more."""
        self.kept: dict[TensorKey, tuple[str, NDArray[Any]]] = {}
        self.unreadable: dict[str, str] = {}
        self.classes: dict[str, str] = {}
        self.step = 0
        self.bytes = 0
        self._start, self._perturbed, self._renamed = start, perturbed, renamed
        self._names: dict[int, str] = {}
        """Names of modules and parameters by id; `_roots` keeps them alive."""
        self._parameters: dict[int, str] = {}
        self._roots: list[Any] = []
        self._depth = 0
        self._root = -1
        self._sites: list[str] = []
        self._site_of: dict[str, str] = {}
        self._first_optimizer: int | None = None
        self._count: Counter[tuple[str, int, str]] = Counter()

    @property
    def is_done(self) -> bool:
        """Return whether all steps to compare were recorded."""
        return self.step >= self.steps

    def enter(self, module: Any, args: Sequence[Any], frame: FrameType) -> None:
        """Note that a module's forward starts."""
        self._depth += 1
        site = next(iter(program_frames(steps(frame))), None)
        self._sites.append("" if site is None else site_text(site))
        if self._depth > 1 or self.is_done:
            return
        if id(module) not in self._names:
            self._learn(module)
        self._root += 1
        self._count.clear()
        keywords = frame.f_locals.get("kwargs")
        values = [*args, *(keywords.values() if isinstance(keywords, dict) else ())]
        for part, tensor in enumerate(tensors_in(values)):
            self._keep("input", "", tensor, part, self._sites[-1])

    def leave(self, module: Any, output: Any) -> None:
        """Record the output of a module's forward."""
        if not self._depth:
            return
        self._depth -= 1
        site = self._sites.pop()
        name = self._names.get(id(module))
        if name is None or self.is_done:
            return
        self._site_of[name] = site
        call = self._count["output", self._root, name]
        self._count["output", self._root, name] += 1
        step, root = self.step, self._root
        for part, tensor in enumerate(tensors_in([output])):
            self._keep("output", name, tensor, part, site, call)
            if tensor.requires_grad and not tensor.is_leaf:
                key = TensorKey(step, "output_gradient", root, name, call, part)
                tensor.register_hook(lambda gradient, key=key: self._add(key, gradient, site))

    def before_step(self, optimizer: Any) -> None:
        """Record the gradients that an optimizer is about to use."""
        if self._first_optimizer is None:
            self._first_optimizer = id(optimizer)
        if not self.is_done:
            for name, parameter in self._of(optimizer):
                if parameter.grad is not None:
                    self._keep("gradient", name, parameter.grad, 0, self._site_of.get(name.rpartition(".")[0], ""))

    def after_step(self, optimizer: Any) -> None:
        """Record the parameters that an optimizer has changed."""
        if not self.is_done:
            for name, parameter in self._of(optimizer):
                self._keep("parameter", name, parameter, 0, self._site_of.get(name.rpartition(".")[0], ""))
        self._depth, self._root = 0, -1
        self._sites.clear()
        if id(optimizer) == self._first_optimizer:
            self.step += 1

    def _of(self, optimizer: Any) -> Iterator[tuple[str, Any]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._parameters.get(id(parameter))
                if name is not None:
                    yield name, parameter

    def _learn(self, model: Any) -> None:
        """Record the names of *model*, and set and keep its initial parameters."""
        self._roots.append(model)
        for name, module in model.named_modules():
            self._names.setdefault(id(module), self._plain(name))
            self.classes[self._plain(name)] = type(module).__name__  # the innermost of those that wrap each other
        for name, parameter in model.named_parameters():
            if id(parameter) in self._parameters:
                continue
            name = self._plain(name)
            self._parameters[id(parameter)] = name
            self._begin(name, parameter)
            self._keep("start", name, parameter, 0, "")

    def _plain(self, name: str) -> str:
        """Return *name* without wrappers, as the other layout names the parameter."""
        name = plain(name)
        for prefix, other in self._renamed.items():
            ranks, _, start = prefix.rpartition(":")
            if (not ranks or str(self.rank) in ranks.split(",")) and (name == start or name.startswith(f"{start}.")):
                return other + name[len(start) :]
        return name

    def _begin(self, name: str, parameter: Any) -> None:
        values = self._start.get(name)
        held = local_part(parameter).detach()
        with torch.no_grad():
            if values is not None and tuple(values.shape) == tuple(held.shape):
                held.copy_(torch.from_numpy(np.array(values)).to(held.device))
            if self._perturbed and held.is_floating_point():
                signs = np.where(np.arange(held.numel()) * 2654435761 % 4096 < 2048, 1.0, -1.0)
                change = torch.from_numpy(signs.reshape(held.shape)).to(held.device)
                held.copy_(held.double() * (1.0 + change * ROUNDING.get(held.dtype, FLOAT32_ROUNDING)))

    def _keep(self, kind: str, name: str, tensor: Any, part: int, site: str, call: int = 0) -> None:
        root = self._root if kind in ("input", "output") else 0
        self._add(TensorKey(0 if kind == "start" else self.step, kind, root, name, call, part), tensor, site)

    def _add(self, key: TensorKey, tensor: Any, site: str) -> None:
        if is_partial(
            tensor
        ):  # a DTensor whose parts are added up where it is used: nothing is missing, nothing to read
            return
        values = self.read(tensor)
        if values is None:
            if key.kind in ("start", "gradient", "parameter") and local_part(tensor).numel():
                self.unreadable[key.name] = f"{type(tensor).__name__} on {local_part(tensor).device}"
            return
        if key.kind == "output_gradient" and key in self.kept:  # a second backward pass adds up
            values = self.kept[key][1] + values
        self.bytes += values.nbytes
        if self.bytes > MOST_BYTES:
            self.refusal = (
                f"rank {self.rank} has more than {MOST_BYTES >> 30} GiB of tensors to compare: compare fewer steps "
                "(--steps 1), a smaller batch or a smaller model"
            )
            return
        self.kept[key] = (site, np.array(values))


def plain(name: str) -> str:
    """Return *name* without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_partial(tensor: Any) -> bool:
    """Return whether *tensor* is a DTensor of which each rank holds a part of a sum."""
    placements = tensor.placements if type(tensor).__name__ == "DTensor" else ()
    return any(placement.is_partial() for placement in placements)


@contextlib.contextmanager
def recording(current: Callable[[], TensorRecorder | None], done: Callable[[], None]) -> Iterator[None]:
    """Return a context in which torch notifies the recorder of the running rank (*current*); *done* is called after
    each step."""

    def enter(module: Any, args: Any) -> None:
        recorder = current()
        if recorder is not None and _backward() == -1:
            recorder.enter(module, args, sys._getframe(1))

    def leave(module: Any, args: Any, output: Any) -> None:
        recorder = current()
        if recorder is not None and _backward() == -1:
            recorder.leave(module, output)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = current()
        if recorder is not None:
            recorder.before_step(optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = current()
        if recorder is not None:
            recorder.after_step(optimizer)
            done()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Return a context in which dropout passes everything, because its random numbers depend on the layout."""
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    before = {name: getattr(functional, name) for name in (*names, "scaled_dot_product_attention")}
    attention = before["scaled_dot_product_attention"]

    def through(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return input

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any) -> Any:
        return attention(query, key, value, attn_mask, 0.0, **rest)

    try:
        for name in names:
            setattr(functional, name, through)
        functional.scaled_dot_product_attention = attend
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)


def write_run(recorders: Mapping[int, TensorRecorder], path: Path) -> None:
    """Write the run as a file for `read_run`: NumPy arrays, and JSON that describes them."""
    arrays: dict[str, NDArray[Any]] = {}
    ranks: dict[str, list[Any]] = {}
    unreadable: dict[str, str] = {}
    classes: dict[str, str] = {}
    for rank, recorder in recorders.items():
        unreadable |= recorder.unreadable
        classes |= recorder.classes
        table = ranks[str(rank)] = []
        for number, (key, (site, values)) in enumerate(recorder.kept.items()):
            arrays[f"{rank}_{number}"] = values
            table.append([*key, site])
    text = json.dumps({"ranks": ranks, "unreadable": unreadable, "classes": classes}).encode()
    with open(path.with_suffix(".part"), "wb") as file:
        np.savez(file, about=np.frombuffer(text, dtype=np.uint8), **arrays)  # type: ignore[arg-type]
    os.replace(path.with_suffix(".part"), path)


def read_run(path: Path) -> RecordedRun:
    """Read what `write_run` wrote; arrays are loaded on access."""
    archive = np.load(path, allow_pickle=False)
    about = json.loads(archive["about"].tobytes())
    ranks = {}
    for rank, table in about["ranks"].items():
        ranks[int(rank)] = {
            TensorKey(*row[:-1]): RecordedTensor(row[-1], lambda name=f"{rank}_{number}": archive[name])  # type: ignore[misc]
            for number, row in enumerate(table)
        }
    return RecordedRun(ranks, about["unreadable"], about["classes"])
