"""Collector of one rank: turns the events that hooks report into facts, step by step."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.autograd.function import FunctionCtx
from torch.distributed import get_process_group_ranks

from distsim.debug.diagnosis.silent.collect.sketch import (
    MOST_ELEMENTS,
    Addresses,
    Parameters,
    Reader,
    ShardedModules,
    Tracked,
    array_of,
    hyperparameters_of,
    local_part,
    mesh_ranks,
    parameters_of,
    ranks_along,
    sample_hashes,
    share_memory,
    sketch,
    tensors_in,
    unreduced_of,
)
from distsim.debug.diagnosis.silent.facts import (
    BufferFact,
    CallCount,
    GroupFact,
    InputFact,
    LocalFact,
    LossFact,
    ParameterFact,
    PlacementFact,
    RankFacts,
    StepFact,
    SumFact,
    TrainingPhase,
    Vector,
    Window,
    may_vary,
)
from distsim.debug.records import P2P, Site
from distsim.debug.records.arguments import MethodCall
from distsim.debug.records.frames import (
    Owner,
    is_between,
    is_torchs,
    outward,
    owner,
    program_frame,
    program_frames,
    steps,
)
from distsim.debug.records.signature import REDUCE_OPS
from distsim.torch_compat.groups import CURRENT_GRAPH_TASK_ID

FIRST_STEPS = 3
EVERY = 100
"""All tensors of an optimizer are sketched in its first `FIRST_STEPS` steps, and then in every 100th."""
TURNS = 16
"""In the other steps, one tensor in 16 is sketched, each in its turn."""
SMALL, FEW = 1 << 18, 256
"""An optimizer with at most so many elements and so many parameters has all of them sketched in every step."""
MOST_INPUTS = 8
"""Largest number of input tensors of a model that are sketched."""
MOST_FACTS = 64
"""Largest number of facts of each kind that are recorded between two steps."""
BY_RANK = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
"""Beginnings of operations whose result depends on the order of ranks in the group."""
SUMS = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
LEAST_SUMMED = 32
"""Smallest number of elements of a sum of activations; below are counts, losses and norms, which may well be equal."""
_JOIN = "/distributed/algorithms/join.py"
GATHERS = ("all_gather", "all_gather_coalesced", "gather", "all_to_all")
"""Operations that write one output tensor for each rank."""

_current_graph_task_id: Callable[[], int] = CURRENT_GRAPH_TASK_ID.get(lambda: -1)

_InDdp = weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], frozenset[str]]]


class _Optimizer:
    """Number of steps of one optimizer, and the parameters that were sketched last."""

    __slots__ = ("number", "reference", "sampled", "steps")

    def __init__(self, number: int, optimizer: Any) -> None:
        self.number = number
        self.reference = weakref.ref(optimizer)
        self.steps = 0
        self.sampled: frozenset[int] = frozenset()
        """Indices of the parameters that were sketched after the last step."""


class Collector:
    """Collector of the facts of one rank.

    Args:
        rank: Global rank.
        publish: Called with each finished step. By default the step is appended to `facts`.
        read: Returns the values of a tensor, or None if they are unknown.
        on_failure: Called if an internal error ends the recording before the program ends.
        sketch_of: Returns the sketch of a tensor, by default from its values.
    """

    def __init__(
        self,
        rank: int,
        publish: Callable[[StepFact], None] | None = None,
        read: Reader = array_of,
        on_failure: Callable[[], None] | None = None,
        sketch_of: Callable[[Any], Vector | None] | None = None,
    ) -> None:
        self.facts = RankFacts(rank)
        self.read = read
        self._sketch = sketch_of or functools.partial(sketch, read=read)
        self.parameters = Parameters(read, self._on_gradient)
        self.facts.parameters = self.parameters.facts
        self._addresses = Addresses(self.parameters)
        self._sharded = ShardedModules(self.parameters)
        self._publish = publish or self.facts.steps.append
        self._on_failure = on_failure
        self._optimizers: dict[int, _Optimizer] = {}
        self._stepping: list[tuple[Any, StepFact | None]] = []
        self.window = Window()
        self.failure: Exception | None = None
        """Internal error that ended the recording; None while the rank is recorded."""
        self._calls: dict[tuple[Any, ...], CallCount] = {}
        self._sites: dict[Any, Site | None] = {}
        self._depth = 0
        self._has_gradients = False
        """Whether a backward pass has produced a gradient since the last step."""
        self.looks_closely = True
        """Whether all tensors are sketched until the next step, and not one in 16."""
        self.roots: dict[Any, LossFact] = {}
        """Losses whose backward pass has not started, by their autograd nodes."""
        self.sorted_groups: list[tuple[weakref.ref[Any], GroupFact]] = []
        """Groups whose ranks torch has sorted, until a call shows that the order matters."""
        self._numbers: list[weakref.ref[Any]] = []
        self._new_ddps: list[weakref.ref[Any]] = []
        self._roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_ddp: _InDdp = weakref.WeakKeyDictionary()
        """Models inside DistributedDataParallel: the group's ranks, and the parameter names that DDP ignores."""
        self._busy = threading.local()

    # -- where in a step

    @property
    def pass_(self) -> TrainingPhase:
        """Return the current phase of the training step."""
        if _current_graph_task_id() != -1:
            return TrainingPhase.BACKWARD
        if self._depth:
            return TrainingPhase.FORWARD
        return TrainingPhase.REDUCTION if self._has_gradients else TrainingPhase.BETWEEN

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Return a context in which nothing is recorded, for calls that distsim itself makes."""
        before = getattr(self._busy, "is_set", False)
        self._busy.is_set = True
        try:
            yield
        finally:
            self._busy.is_set = before

    @property
    def is_busy(self) -> bool:
        """Return whether events are ignored: this thread runs distsim's own code, or the recording has failed."""
        return self.failure is not None or getattr(self._busy, "is_set", False)

    def hear(self, event: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call *event* to record something. An exception in it ends the recording and not the program."""
        if self.is_busy:
            return
        try:
            event(*args, **kwargs)
        except Exception as error:  # a tensor or module of a kind that nobody has thought of
            self.failure = error
            if self._on_failure is not None:
                self._on_failure()

    @property
    def num_steps(self) -> int:
        """Return the largest number of steps that one optimizer has made."""
        return max((record.steps for record in self._optimizers.values()), default=0)

    def sketch(self, tensor: Any) -> Vector | None:
        """Return the sketch of a tensor, or None if its values are unknown or not finite."""
        vector = self._sketch(tensor)
        return vector if vector is not None and np.isfinite(vector).all() else None

    def here(self, kind: str) -> Site | None:
        """Return the user's line that is running. The lookup is cached for each *kind*."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and owner(frame.f_code.co_filename) is not Owner.USER:
            frame = frame.f_back
        return None if frame is None else self.site((kind, frame.f_code, frame.f_lineno), frame)

    def site(self, key: Any, frame: FrameType | None) -> Site | None:
        """Return the innermost user's line at or above *frame*. The lookup is cached for each *key*."""
        if key not in self._sites:
            self._sites[key] = next(iter(program_frames(steps(frame))), None)
        return self._sites[key]

    # -- models

    def enter_module(self, module: Any, args: Sequence[Any], frame: FrameType) -> None:
        """Handle the start of a module's forward pass."""
        if _current_graph_task_id() != -1:
            return
        self._depth += 1
        if self._depth == 1:
            self._enter_root(module, args, frame)
        if self.looks_closely and _is_sharded(module.__class__):
            self._sharded.enter(module)
        elif self.looks_closely and self._depth == 2 and module.training and module in self._in_ddp:
            self._add_buffers(module)

    def _add_buffers(self, module: Any) -> None:
        """Record what no gradient reaches: buffers after DistributedDataParallel's broadcast, and then parameters."""
        ranks, ignored = self._in_ddp[module]
        for name, buffer in unreduced_of(module) if torch.is_grad_enabled() else ():
            if name in ignored or not buffer.is_floating_point() or buffer.numel() > MOST_ELEMENTS or may_vary(buffer):
                continue
            if self.keeps(self.window.buffers) and (vector := self.sketch(buffer)) is not None:
                self.window.buffers.append(BufferFact(name, ranks, vector))

    def leave_module(self, module: Any, args: Sequence[Any]) -> None:
        """Handle the end of a module's forward pass, also by an exception. *args* are the inputs after its
        pre-hooks.
        """
        if _current_graph_task_id() != -1 or not self._depth:
            return
        self._depth -= 1
        if self.looks_closely:
            for tensor in args:
                if type(tensor).__name__ == "DTensor":
                    self._add_placement(module, tensor)
            if _is_sharded(module.__class__) and self.keeps(self.window.lost_writes):
                self.window.lost_writes += self._sharded.written(module)

    def _add_placement(self, module: Any, tensor: Any) -> None:
        ranks = mesh_ranks(tensor.device_mesh, tensor.placements)
        vector = self.sketch(tensor) if len(ranks) > 1 and self.keeps(self.window.placements) else None
        if vector is not None and not any(placement.is_partial() for placement in tensor.placements):
            shape, site = tuple(local_part(tensor).shape), self.here("placement")
            self.window.placements.append(PlacementFact(type(module).__name__, ranks, vector, shape, site))

    def add_part(self, part: Any, mesh: Any, shards: Sequence[Any], whole: Any) -> None:
        """Record a DTensor that the program makes of *part*: what is replicated, and along which dimension it is
        divided.

        *shards* has the placement of each dimension of the mesh, None where it is replicated.
        """
        shape, site = tuple(int(size) for size in part.shape), self.here("part")
        ranks = ranks_along(mesh, [shard is None for shard in shards])
        if len(ranks) > 1 and self.keeps(self.window.placements) and (vector := self.sketch(part)) is not None:
            self.window.placements.append(PlacementFact("DTensor.from_local", ranks, vector, shape, site))
        divided = [shard for shard in shards if shard is not None]
        if len(divided) == 1 and self.keeps(self.window.parts):
            given = None if whole is None else tuple(int(size) for size in whole)
            ranks = ranks_along(mesh, [shard is not None for shard in shards])
            self.window.parts.append(LocalFact(ranks, int(divided[0].dim) % part.ndim, shape, given, site))

    def keeps(self, facts: Sequence[Any]) -> bool:
        """Return whether *facts* has room for one more entry before the next step."""
        return len(facts) < MOST_FACTS

    def number_of(self, thing: Any) -> int:
        """Return the number of an object of the program. Numbers start at 0 in the order of first use."""
        for number, reference in enumerate(self._numbers):
            if reference() is thing:
                return number
        self._numbers.append(weakref.ref(thing))
        return len(self._numbers) - 1

    def _enter_root(self, module: Any, args: Sequence[Any], frame: FrameType) -> None:
        self._add_ddps()
        if self._has_gradients:
            self._updated_by_hand()
        if module not in self._roots:
            if next(parameters_of(module), None) is None:
                return
            self._roots.add(module)
            self.add_model(getattr(module, "module", module))
            if type(module).__name__ == "FullyShardedDataParallel":
                ranks = tuple(get_process_group_ranks(module.process_group))
                for fact in self._facts_of(module):
                    fact.fsdp = ranks
        if not torch.is_grad_enabled() or not self.keeps(self.window.inputs):
            return
        keywords = frame.f_locals.get("kwargs")
        tensors = list(tensors_in([*args, *(keywords.values() if isinstance(keywords, dict) else ())]))[:MOST_INPUTS]
        arrays = [value for t in tensors if (value := self.read(t)) is not None]
        values = [value.reshape(-1)[:MOST_ELEMENTS] for value in arrays]
        if not values or len(values) < len(tensors):
            return
        vectors = tuple(sketch_of for t in tensors if (sketch_of := self.sketch(t)) is not None)
        if len(vectors) == len(tensors):
            shapes = tuple(tuple(t.shape) for t in tensors)
            constant = all(bool((value == value[0]).all()) for value in values)
            site = self.site((type(module), frame.f_code), frame)
            name = type(getattr(module, "module", module)).__name__
            samples = sample_hashes(arrays[0]) if module.training else ()
            self.window.inputs.append(InputFact(name, bool(module.training), shapes, vectors, constant, site, samples))

    def add_model(self, model: Any) -> None:
        """Start to follow the parameters of *model*."""
        self.parameters.add_model(model)
        self._addresses.forget()

    def new_ddp(self, ddp: Any) -> None:
        """Store a DistributedDataParallel whose constructor is about to broadcast the parameters."""
        self._new_ddps.append(weakref.ref(ddp))

    def _add_ddps(self) -> None:
        """Record each stored DistributedDataParallel whose constructor has ended."""
        while self._new_ddps:
            ddp = self._new_ddps.pop()()
            if ddp is None or getattr(ddp, "process_group", None) is None:
                continue
            self.add_model(ddp.module)
            with self.set_aside():
                try:
                    ranks = tuple(get_process_group_ranks(ddp.process_group))
                except KeyError:  # a group past torch's functions, as torchft's: who averages is not known
                    continue
            for fact in self._facts_of(ddp):
                fact.ddp = ranks
            self._in_ddp[ddp.module] = ranks, frozenset(getattr(ddp, "parameters_to_ignore", ()))

    def compress(self, ddp: Any) -> None:
        """Handle the registration of a DDP communication hook, which may approximate gradients."""
        self._add_ddps()
        for fact in self._facts_of(ddp):
            fact.compressed = True

    def _facts_of(self, ddp: Any) -> Iterator[ParameterFact]:
        ignored = getattr(ddp, "parameters_to_ignore", ())
        for name, parameter, _ in parameters_of(ddp.module):
            tracked = self.parameters.get(parameter)
            if tracked is not None and name not in ignored:
                yield self.parameters.facts[tracked.index]

    def _on_gradient(self, tracked: Tracked, gradient: Any) -> None:
        """Handle a local gradient that a backward pass has computed for a parameter."""
        self.hear(self._add_gradient, tracked, gradient)

    def _add_gradient(self, tracked: Tracked, gradient: Any) -> None:
        self._addresses.forget()
        self._has_gradients = True
        parameter = tracked.reference()
        if parameter is not None and parameter.grad is None:
            tracked.local.clear()
        if tracked.sampled and self.keeps(tracked.local) and (vector := self.sketch(gradient)) is not None:
            tracked.local.append(vector)
        if parameter is not None and tracked.before is None and not tracked.has_optimizer:
            by_hand = self._optimizers.get(id(self))
            if by_hand is None or by_hand.steps < FIRST_STEPS:
                tracked.before = self.sketch(parameter)

    # -- optimizers

    def _updated_by_hand(self) -> None:
        """Record as a step that the program itself has changed parameters since their backward pass."""
        waiting = [(t, t.before, self.sketch(p)) for p, t in self.parameters.living() if t.before is not None]
        if all(after is None or np.array_equal(before, after) for _, before, after in waiting):
            return
        record = self._record_of(self)
        record.steps += 1
        step = StepFact(record.number, record.steps, tuple(tracked.index for tracked, *_ in waiting))
        for tracked, before, after in waiting:
            _put(step.before, tracked.index, before)
            _put(step.after, tracked.index, after)
            step.local[tracked.index] = tracked.local
            step.hyperparameters[tracked.index] = ()
            tracked.local, tracked.before = [], None
        self._end_step(step)

    def before_step(self, optimizer: Any, has_closure: bool, frame: FrameType) -> None:
        """Handle the start of `Optimizer.step`."""
        if self._stepping:  # ZeRO's own optimizer steps inside its step
            self._stepping.append((optimizer, None))
            return
        self._add_ddps()
        record = self._record_of(optimizer)
        record.steps += 1
        self._depth = 0
        followed = self._followed(optimizer)
        numbers = tuple(tracked.index for _, tracked, _ in followed)
        step = StepFact(record.number, record.steps, numbers, has_closure=has_closure)
        step.site = self.site(id(optimizer), frame)
        step.owns_state = not any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
        sampled = self._sampled(record.steps, followed)
        for parameter, tracked, group in followed:
            number, gradient = tracked.index, parameter.grad
            tracked.has_optimizer, tracked.before = True, None
            step.without_gradient += gradient is None
            self.facts.parameters[number].varies = may_vary(parameter)
            step.hyperparameters[number] = group
            if number not in sampled and number not in record.sampled:
                continue
            _put(step.before, number, self.sketch(parameter))
            if number in sampled and gradient is not None and not has_closure:
                _put(step.gradients, number, self.sketch(gradient))
                if tracked.local:
                    step.local[number] = tracked.local
                step.state[number] = self._state_of(optimizer, parameter)
        record.sampled = sampled
        self._stepping.append((optimizer, step))

    def after_step(self, optimizer: Any) -> None:
        """Handle the end of `Optimizer.step`."""
        while self._stepping:
            of, step = self._stepping.pop()
            if of is optimizer:
                break
        else:
            return
        if step is None:
            return
        record = self._record_of(optimizer)
        followed = self._followed(optimizer)
        following = self._sampled(record.steps + 1, followed)
        for parameter, tracked, _ in followed:
            if tracked.index in record.sampled:
                _put(step.after, tracked.index, self.sketch(parameter))
            tracked.local = []
            tracked.sampled = tracked.index in following
        self.looks_closely = len(following) == len(followed)
        self._end_step(step)

    def _end_step(self, step: StepFact) -> None:
        step.window, self.window, self._calls = self.window, Window(), {}
        self._has_gradients = False
        self.roots.clear()
        self._publish(step)

    def _record_of(self, optimizer: Any) -> _Optimizer:
        record = self._optimizers.get(id(optimizer))
        if record is None or record.reference() is not optimizer:
            record = self._optimizers[id(optimizer)] = _Optimizer(len(self._optimizers), optimizer)
        return record

    def _followed(self, optimizer: Any) -> list[tuple[Any, Tracked, tuple[tuple[str, float], ...]]]:
        """Return the parameters of *optimizer* with their records and hyperparameters."""
        followed = []
        for group_index, group in enumerate(optimizer.param_groups):
            numbers = hyperparameters_of(group)
            for number, parameter in enumerate(group["params"]):
                tracked = self.parameters.get(parameter)
                if tracked is None:
                    tracked = self.parameters.of_optimizer(parameter, f"param_groups[{group_index}][{number}]")
                    self._addresses.forget()
                followed.append((parameter, tracked, numbers))
        return followed

    def _sampled(self, step: int, followed: Sequence[tuple[Any, Tracked, Any]]) -> frozenset[int]:
        """Return the indices of the parameters to sketch in *step*."""
        numbers = [tracked.index for _, tracked, _ in followed]
        is_large = len(numbers) > FEW or sum(self.parameters.facts[number].numel for number in numbers) > SMALL
        if step > FIRST_STEPS and step % EVERY and is_large:
            return frozenset(number for index, number in enumerate(numbers) if index % TURNS == step % TURNS)
        return frozenset(numbers)

    def _state_of(self, optimizer: Any, parameter: Any) -> dict[str, Vector]:
        state = getattr(optimizer, "state", {})
        entries = state.get(parameter) if isinstance(state, Mapping) and parameter in state else None
        vectors: dict[str, Vector] = {}
        if not isinstance(entries, Mapping):
            return vectors
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                _put(vectors, str(name), self.sketch(value))
            elif isinstance(value, int | float) and not isinstance(value, bool):
                vectors[str(name)] = np.array([value, *[0.0] * 15], dtype=np.float32)
        return vectors

    # -- calls

    def on_call(self, call: MethodCall, ranks: tuple[int, ...], rank: int, frame: FrameType | None) -> None:
        """Record a collective or message that a process group is about to run. *frame* is the caller of the group's
        method.
        """
        self.hear(self._add_call, call, ranks, rank, frame)

    def _add_call(self, call: MethodCall, ranks: tuple[int, ...], rank: int, frame: FrameType | None) -> None:
        op = call.key[0]
        members = tuple(sorted({rank, call.peer} - {-1})) if op in P2P else ranks
        reduce_op = None if call.key[4] is None else REDUCE_OPS[call.key[4]] if call.key[4] < len(REDUCE_OPS) else "?"
        caller = program_frame(frame)
        by_torch = caller is not None and is_torchs(caller.f_code)
        where = self.pass_
        if where is not TrainingPhase.BACKWARD and _is_forward(caller):
            where = TrainingPhase.FORWARD  # of an autograd.Function outside of any module
        key = (op, members, reduce_op, where, by_torch)
        total = self._calls.get(key)
        if total is None:
            total = self._calls[key] = CallCount(op, members, reduce_op, where, by_torch, self.site(key, caller))
            self.window.calls.append(total)
        total.count += 1
        for tensor in (*call.inputs, *call.outputs):
            total.largest = max(total.largest, int(tensor.numel()))
        if by_torch and _joins(caller):
            self.window.joined = True
        if op in SUMS and reduce_op == "SUM" and self.looks_closely and _is_forward(caller):
            self._add_sum(call, members, total.site)
        if self.sorted_groups and op.startswith(BY_RANK) and frame is not None:
            self._use_sorted(op, frame)
        if len(call.outputs) > 1 and op in GATHERS and share_memory(call.outputs):
            self.window.aliased.append((op, members, total.site))
        if self.parameters.facts and where in (TrainingPhase.REDUCTION, TrainingPhase.BETWEEN):
            for tensor in call.inputs or call.outputs:
                gradient = self._addresses.gradient_of(tensor)
                value = None if gradient is not None else self._addresses.value_of(tensor)
                if gradient is not None:
                    total.gradients.add(gradient.index)
                elif value is not None:
                    total.values.add(value.index)

    def _add_sum(self, call: MethodCall, ranks: tuple[int, ...], site: Site | None) -> None:
        for tensor in call.inputs:
            if tensor.is_floating_point() and tensor.numel() >= LEAST_SUMMED and self.keeps(self.window.sums):
                vector = self.sketch(tensor)
                if vector is not None:
                    self.window.sums.append(SumFact(ranks, vector, tuple(tensor.shape), site))

    def _use_sorted(self, op: str, frame: FrameType) -> None:
        """Record the group of *op* if torch has sorted its ranks. torch's function has the group as a variable."""
        while frame.f_back is not None and frame.f_locals.get("group") is None and is_between(frame.f_code):
            frame = frame.f_back
        for entry in self.sorted_groups:
            if entry[0]() is frame.f_locals.get("group"):
                self.sorted_groups.remove(entry)
                entry[1].op = op
                self.window.groups.append(entry[1])
                return


@functools.lru_cache(maxsize=1024)
def _is_sharded(kind: Any) -> bool:
    """Return whether *kind* is a class that fully_shard creates for a module."""
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def _is_forward(frame: FrameType | None) -> bool:
    """Return whether *frame*, or a near caller of it, runs the forward pass of an autograd.Function.

    The first argument of that is its context. Megatron-LM's call a helper that calls a helper.
    """
    for one in islice(outward(frame), 4):
        if one.f_code.co_name == "forward" and one.f_code.co_argcount:
            return isinstance(one.f_locals.get(one.f_code.co_varnames[0]), FunctionCtx)
    return False


def _joins(frame: FrameType | None) -> bool:
    """Return whether `Join` repeats a call of the others, as it does when the rank has run out of data."""
    codes = (one.f_code for one in islice(outward(frame), 6))
    return any(code.co_name == "__exit__" and code.co_filename.endswith(_JOIN) for code in codes)


def _put(vectors: dict[Any, Vector], key: Any, vector: Vector | None) -> None:
    if vector is not None:
        vectors[key] = vector
