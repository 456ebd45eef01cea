"""Dispatches every operator of a rank.

On CPU tensors it runs and is priced. On tensors of a simulated GPU it is launched on a stream, and its results have
shapes and dtypes but no data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distsim.kernels import Cost, KnownKernel
from distsim.kernels.gpu import RECORDED_SHARE
from distsim.sim.device.allocator.host_memory import erase_storage, moved_to_gpu
from distsim.sim.device.cpu import CpuRates
from distsim.sim.device.generator import PlainGenerator
from distsim.sim.device.gpu import Device
from distsim.sim.device.hooks import carrier, under_meta
from distsim.sim.device.memory import accelerators_of, current_stream
from distsim.sim.device.operators.kinds import (
    COMPOSITE,
    FLEX,
    HIGHER,
    PASSED,
    PYTHON,
    VIEW,
    classify,
    gpu_of,
    kinds,
    look,
    without_hiding_attributes,
)
from distsim.sim.device.operators.plan import (
    LOOKS_LIKE,
    MISTAKES,
    Given,
    NewTensor,
    OperatorPlan,
    key_of,
    learn,
    takes_any_float,
    tensors_in,
)
from distsim.sim.device.operators.special import SPECIAL, Handler, guess_truth, is_check, note_truth, typical_draw
from distsim.sim.device.operators.transfers import (
    BY_NAME,
    ON_HOST,
    PINNING,
    STAGED,
    TRANSFERS,
    asks_for_memory,
    decomposed,
    make_pinned,
    not_on_host,
)
from distsim.sim.device.operators.uneven import DRAWS, draw
from distsim.sim.device.operators.values import KNOWLEDGE, Values
from distsim.sim.device.timeline.steps import ended_step
from distsim.sim.isolation.modules.own_code import no_launch, title_of
from distsim.sim.isolation.process import RankTask
from distsim.torch_compat import device as device_names
from distsim.torch_compat.compiler import leaves_code
from distsim.torch_compat.groups import CURRENT_GRAPH_TASK_ID

if TYPE_CHECKING:
    from distsim.sim.device.operators.reading import Reading

_disabled_torch_dispatch_impl = device_names.DISABLED_TORCH_DISPATCH_IMPL.get()
DispatchKey = device_names.DISPATCH_KEY.get()
FakeTensor = device_names.FAKE_TENSOR.get()
_get_dispatch_mode = device_names.GET_DISPATCH_MODE.get()
TorchDispatchMode = device_names.TORCH_DISPATCH_MODE.get()
_TorchDispatchModeKey = device_names.TORCH_DISPATCH_MODE_KEY.get()

aten = torch.ops.aten
HANDLERS: dict[Any, Handler] = {**TRANSFERS, **SPECIAL, **FLEX}
_default_dtype = torch.get_default_dtype
_current_graph_task_id = CURRENT_GRAPH_TASK_ID.get()
_mode_of, _FAKE = _get_dispatch_mode, _TorchDispatchModeKey.FAKE


class ComputeMode(TorchDispatchMode):  # type: ignore[misc,valid-type]
    """Active in every thread of a rank: charges each operator to the thread's virtual time, or to its GPU."""

    supports_higher_order_operators = True

    def __init__(self, task: RankTask, cpu: CpuRates) -> None:
        super().__init__()
        self.task = task
        self._cpu = cpu
        self._process = task.process
        self._observers = self._process.observers
        faults = task.port.faults
        self._delayed = faults.host_s if faults.are_planted else None
        task.dispatch_mode = self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping `__torch_dispatch__` against compilation, at 3 us a call; `_not_compiled` does it
        for free.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _mode_of(_FAKE) is not None or (types and FakeTensor in types):
            self.task.port.ticks += 1  # a sign of life
            return func(*args, **kwargs)  # shapes only (DTensor's sharding rules): nothing is computed
        for kind in types:
            if kind.__torch_dispatch__ is not _disabled_torch_dispatch_impl:
                return NotImplemented  # DTensor, AsyncCollectiveTensor, ...: it takes itself apart first
        accelerators = self._process.accelerators
        if accelerators is not None and (accelerators.some_used or asks_for_memory(func)):
            device = gpu_of(args, kwargs)
            if device is not None:
                try:
                    return self._on_gpu(func, args, kwargs, device)
                except MISTAKES as error:
                    if isinstance(error, TypeError):
                        with without_hiding_attributes(tensors_in((args, kwargs))) as hiding:
                            if hiding:
                                return self._on_gpu(func, args, kwargs, device)
                    explained = self.values.explain_empty(error, tensors_in((args, kwargs)))
                    if explained is None:
                        raise
                    raise explained from None
            pinning = PINNING.get(func)
            if pinning is not None:
                return pinning(partial(self._cpu.run, self.task), args)
            if kwargs and kwargs.pop("pin_memory", False):
                return make_pinned(self._cpu.run(self.task, func, args, kwargs))
        elif kwargs and getattr(kwargs.get("device"), "type", "cpu") == "cuda":
            accelerators_of(self._process)  # says that there is none
        return self._cpu.run(self.task, func, args, kwargs)

    # -- on a GPU

    def _on_gpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
        kind = kinds.get(func)
        if kind is None:
            kind = kinds[func] = classify(func)
            if (handler := BY_NAME.get(func.name())) is not None:
                HANDLERS[func] = handler
        if kind == HIGHER:  # (start of the numbers, end, operator, its arguments): DTensor's random operators
            with self:
                return args[2](*args[3:], **kwargs)
        task = self.task
        task.port.ticks += 1
        if kind == VIEW:
            self._launches_view(args)
            return under_meta(func, args, kwargs)
        self._process.accelerators.operator = func
        done = self._taken_apart(func, kind, args, kwargs)
        if done is not NotImplemented:
            return done
        base = task.cuda_device if device.index is None else device.index
        return self._compute(func, args, kwargs, base, self._plan(func, args, kwargs, base))

    def _launches_view(self, args: tuple[Any, ...]) -> None:
        accelerators = self._process.accelerators
        fusion, host_s = accelerators.fusion, accelerators.host.view_s
        if is_recorded(args):
            host_s *= RECORDED_SHARE
        if fusion is not None and fusion.compiles(self.task):
            fusion.spares(host_s)
        else:
            self._launches(host_s)

    def _taken_apart(self, func: Any, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator that has a rule, consists of others, or only changes views; NotImplemented
        for one with kernels."""
        handler = HANDLERS.get(func)
        if handler is not None:
            done = handler(self, func, args, kwargs)
            if done is not NotImplemented:
                self._saw_operator(None)
                self._reads((args, kwargs))
                self._observed(func, args, kwargs, done)
                return done
        if kind == COMPOSITE:
            with self:
                done = func.decompose(*args, **kwargs)
            if done is not NotImplemented:
                return done
        elif kind == PASSED:
            with self:
                return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        elif kind == PYTHON:
            with self:
                return func._op_dk(DispatchKey.CUDA, *args, **kwargs)
        elsewhere = kwargs.get("device")
        if elsewhere is not None and elsewhere.type != "cuda":  # x.new_zeros(3, device="cpu")
            return self._cpu.run(self.task, func, tuple(look(value) for value in args), kwargs)
        return NotImplemented

    def _saw_operator(self, number: int | None) -> None:
        """Report the operator to the comparison of equal ranks."""
        traced = self.task.port.traced
        if traced.counts and self.task not in traced.apart:
            traced.saw_operator(self._process.rank, number)

    def _plan(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: int) -> OperatorPlan:
        """Return the plan of *func* for arguments with these properties, from the cache or worked out now."""
        accelerators = self._process.accelerators
        plans: dict[Any, OperatorPlan] = accelerators.plans
        plan: OperatorPlan | None
        try:
            loose = takes_any_float(func)
            named = key_of(tuple(kwargs.items()), base, loose) if kwargs else ()
            key = (id(func), _default_dtype(), key_of(args, base, loose), named)
            plan = plans.get(key)
        except TypeError:  # an argument that cannot be hashed
            key, plan = None, None
        if plan is not None and (plan.precision is None or plan.precision == _precision()):
            return plan
        gpu = accelerators[base]
        plan = learn(func, args, kwargs, gpu.torch_device, gpu.model.cost)
        plan.checks, plan.typical = is_check(func, args, plan.outs), typical_draw(func, args, kwargs)
        if plan.cost.kind in ("gemm", "conv") and torch.float32 in {t.dtype for t in tensors_in((args, kwargs))}:
            plan.precision = _precision()
        plan.offset = (plan.device.index if plan.device is not None else base) - base
        if key is not None:
            plans[key] = plan
        return plan

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: int, plan: OperatorPlan) -> Any:
        """Launch the kernels of *plan*, and return their result with its memory, and its values if they are known."""
        task, accelerators = self.task, self._process.accelerators
        for path, size in plan.grown:
            with self:
                Given(path).of(args, kwargs).resize_(size)
        fusion = accelerators.fusion
        if fusion is not None and not fusion.compiles(task):
            fusion = None
        if fusion is None:
            self._reads((args, kwargs))
            host_s = accelerators.host.operator_s
            self._launches(host_s * RECORDED_SHARE if is_recorded(args) else host_s)
        task.quiet_polls = task.time_queries = 0
        gpu = accelerators[base + plan.offset]
        stream = current_stream(task, gpu)
        truth = guess_truth(self.values, func, args) if plan.checks else None
        gpu.is_late = fusion is not None and plan.cost.kernels > 0 and fusion.merges(plan.cost, func)
        if fusion is not None and plan.cost.kernels and not gpu.is_late:
            fusion.flush(fusion.read((args, kwargs)))  # what it reads has its memory before what comes out
        try:
            if plan.valued or self.values.everything:
                result = self._valued(func, args, kwargs, plan, gpu, stream)
            else:
                result = self._unvalued(args, kwargs, plan, gpu, stream)
        finally:
            gpu.is_late = False
        if plan.checks and "_distsim_shadow" not in result.untyped_storage().__dict__:
            note_truth(result, truth)
        if func in DRAWS and not self.values.everything:
            draw(self.values, func, args, kwargs, result)
        if plan.typical is not None:
            result.untyped_storage()._distsim_typical = plan.typical
        self._saw_operator(plan.number)
        if self._observers.recorder is not None:
            self._observers.recorder.arguments = args
        if gpu.in_flight.open and (plan.written or plan.cost.kernels):
            written = tensors_in([Given(path).of(args, kwargs) for path in plan.written])
            takes_shape = "_like" in str(func)  # zeros_like: of its argument the shape alone
            read = [] if takes_shape else tensors_in([*args, *kwargs.values()])
            gpu.in_flight.used(stream, written, read)
        if (cost := plan.cost).kernels:
            if accelerators.remote_cost is not None:
                cost = accelerators.remote_cost(cost, tensors_in((args, kwargs)))
            if fusion is None:
                gpu.launch(stream, cost, task, func)
            else:
                fusion.launch(gpu, stream, cost, task, func, (args, kwargs), result)
        steps = accelerators.steps
        if plan.written and steps.awaits_update and steps.update(func, args, gpu.timeline, stream, task.now_s()):
            ended_step(task)
        if plan.counted is not None:
            steps.count(plan.counted, args)
        self._observed(func, args, kwargs, result)
        return result

    def _observed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Report an operator that has run to those who follow values, and to the program's own observer."""
        if self._observers.provenance is not None:
            self._observers.provenance.ran(func, args, kwargs, result)
        if self._observers.execution_trace is not None:
            self._observers.execution_trace.ran(func, args, kwargs, result)

    def _unvalued(self, args: Any, kwargs: Any, plan: OperatorPlan, gpu: Device, stream: Any) -> Any:
        """Return the result without values; what was known of tensors that are written is known no more."""
        for path in plan.written:
            self._forget(Given(path).of(args, kwargs))
        if plan.kind is None:
            return self._part(plan.outs[0], args, kwargs, gpu, stream)
        return plan.kind([self._part(out, args, kwargs, gpu, stream) for out in plan.outs])

    def _reads(self, values: Any) -> None:
        """Have compiled code write those of *values* that it has not, because code that is not compiled reads them."""
        fusion = self._process.accelerators.fusion
        if fusion is not None:
            fusion.is_read(values)

    def _launches(self, seconds: float) -> None:
        """Spend the host's time for a launch, which is longer if an injected fault takes the CPU away."""
        task = self.task
        if self._delayed is not None:
            seconds = self._delayed(self._process, task.now_s(), seconds)
        self._process.accelerators.works_on_host(task, seconds)

    def _part(self, out: Any, args: Any, kwargs: Any, gpu: Device, stream: Any) -> Any:
        if type(out) is NewTensor:
            part = carrier(out.size, out.stride, out.dtype, gpu.torch_device)
            gpu.memory.ledger.shape = out.size, out.dtype
            gpu.hold(part.untyped_storage(), stream)
            return part
        if type(out) is Given:
            return out.of(args, kwargs)
        if isinstance(out, list | tuple):
            return type(out)([self._part(item, args, kwargs, gpu, stream) for item in out])
        return out

    def _forget(self, written: Any) -> None:
        for tensor in tensors_in(written):
            if not tensor.is_cpu and not tensor.untyped_storage().__dict__.keys().isdisjoint(KNOWLEDGE):
                self.values.forget(tensor)

    def _valued(self, func: Any, args: Any, kwargs: Any, plan: OperatorPlan, gpu: Device, stream: Any) -> Any:
        """Return the result with its values, where those of the arguments are known."""
        values = self.values
        known = True
        guess: bool | str = False

        def host(value: Any) -> Any:
            nonlocal known, guess
            if isinstance(value, Tensor):
                if value.is_meta:  # empty_like(x, device="cuda"): only its looks are asked for
                    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
                host_value = values.host(value)
                if host_value is None:
                    known = False
                    return value
                guess = guess or values.guessed(value)
                return host_value
            if isinstance(value, list | tuple):
                return type(value)([host(item) for item in value])
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return value

        overwritten = func in _OVERWRITE  # what was there before does not matter
        if func in LOOKS_LIKE:
            args = (look(args[0]), *args[1:])
        host_args = tuple(host(a) if not (overwritten and i == 0) else a for i, a in enumerate(args))
        host_kwargs = {name: host(value) for name, value in kwargs.items() if name != "pin_memory"}
        if guess and func in _COMPARISONS and args[0].shape == args[1].shape:
            guess = True  # a choice that is compared with labels is a classifier's, not a router's
        if overwritten and known:
            known = values.keeps(args[0].numel(), args[0].dtype)
            like = args[0]
            blank = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
            host_args = (blank, *host_args[1:])
        compute = ON_HOST.get(func)
        compute = func if compute is None else partial(compute, plan.outs)
        try:
            if plan.random and known and not any(isinstance(v, PlainGenerator) for v in kwargs.values()):
                with self._process.accelerators.drawing(gpu.index):
                    answer = compute(*host_args, **host_kwargs)
            elif known:
                answer = compute(*host_args, **host_kwargs)
        except NotImplementedError:  # only a GPU has this operator
            if values.everything:
                answer = decomposed(func, host_args, host_kwargs)
            else:
                known = False
        if known and func in _UNINITIALIZED and isinstance(answer, Tensor):
            erase_storage(answer.untyped_storage())  # the host's memory holds anything, another thing in each run
        if overwritten:
            values.write(args[0], host_args[0] if known else None, guess)
            return args[0]
        if not known and values.everything:
            raise not_on_host(func, "on unknown values")
        parts = [] if not known else list(answer) if isinstance(answer, tuple | list) else [answer]
        parts_made = []
        for i, out in enumerate(plan.outs):
            part = self._part(out, args, kwargs, gpu, stream)
            parts_made.append(part)
            if type(out) is NewTensor:
                if known and values.keeps(out.numel, out.dtype):
                    value: Any = parts[i] if i < len(parts) else None
                    if value is None:
                        value = torch.zeros(out.size, dtype=out.dtype, device="cpu")
                    if value.shape == tuple(out.size):  # the host may leave out what its own backward does not need
                        values.know(part, value, guess)
        if known:
            if guess:
                for path in plan.written:
                    for tensor in tensors_in(Given(path).of(args, kwargs)):
                        shadow = values.shadow(tensor)
                        if shadow is not None:
                            shadow.guess = shadow.guess or guess
        else:
            for path in plan.written:
                self._forget(Given(path).of(args, kwargs))
        return parts_made[0] if plan.kind is None else plan.kind(parts_made)

    def launch_own_kernel(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: KnownKernel | None = None
    ) -> None:
        """Launch the kernel *name*, such as `triton::add`; its tensors have no known values afterwards."""
        task, tensors = self.task, [t for t in tensors_in((args, kwargs)) if t.is_cuda]
        data = task.port.facts.data
        gpu = self.gpu(tensors[0].device if tensors else torch.device("cuda"))
        cost, is_declared = gpu.model.launch_cost(name, args, kwargs, sum(map(_bytes_of, tensors)), known)
        if data.real or (data.strict_kernels and not is_declared):
            why = "with --data real" if data.real else "with --strict-kernels"
            raise no_launch(name, why)
        if not is_declared:
            task.port.note(
                f"{title_of(name)}: priced as one pass over each of its tensors; "
                f"distsim.kernel_cost('{name}', flops=..., bytes=...) sets its cost, --strict-kernels refuses it"
            )
        self._reads(tensors)
        for tensor in tensors:
            self._forget(tensor)
        if self._observers.provenance is not None:
            self._observers.provenance.wrote(name, tensors)
        task.port.ticks += 1
        task.quiet_polls = task.time_queries = 0
        kind, _, own_name = name.partition("::")
        host_s = gpu.host.triton_wrapper_s if known is not None else gpu.host.triton_s if kind == "triton" else None
        self.launch(gpu.torch_device, cost, own_name, host_s)
        if task.port.traced.counts and task not in task.port.traced.apart:
            task.port.traced.saw_operator(self._process.rank, None)

    # -- for the handlers

    @property
    def values(self) -> Values:
        values: Values = self._process.accelerators.values
        return values

    under_meta = staticmethod(under_meta)

    def indexed(self, device: torch.device) -> torch.device:
        """Return *device* with its index: that of the current device if none is given."""
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.task.cuda_device)
        return device

    def gpu(self, device: torch.device) -> Device:
        return accelerators_of(self._process)[self.indexed(device).index]

    def cost_of(self, device: torch.device) -> Callable[..., Cost]:
        return self.gpu(device).model.cost

    def carry(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        gpu = self.gpu(device)
        tensor = carrier(size, stride, dtype, gpu.torch_device)
        gpu.memory.ledger.shape = size, dtype
        gpu.hold(tensor.untyped_storage(), current_stream(self.task, gpu))
        return tensor

    def make(self, out: NewTensor, device: torch.device) -> Tensor:
        return self.carry(out.size, out.stride, out.dtype, device)

    def launch_plain(self, device: torch.device, nbytes: int) -> None:
        """Launch a kernel that only reads and writes *nbytes*."""
        self.launch(device, self.gpu(device).plain_cost(nbytes), aten.copy_.default)

    def launch(self, device: torch.device, cost: Cost, name: Any, host_s: float | None = None) -> None:
        """Launch the kernels of one operator on the current stream, which takes the host *host_s* (None: as an
        operator).
        """
        gpu = self.gpu(device)
        self._launches(gpu.host.operator_s if host_s is None else host_s)
        gpu.launch(current_stream(self.task, gpu), cost, self.task, name)

    def copy_time(self, tensor: Tensor, to_host: bool, blocking: bool) -> None:
        """Launch a transfer over PCIe on the current stream. The host waits if it does in torch."""
        gpu = self.gpu(tensor.device)
        self._launches(gpu.host.operator_s)
        nbytes = tensor.numel() * tensor.element_size()
        stream = current_stream(self.task, gpu)
        cost = gpu.model.transfer(nbytes, to_device=not to_host, pinned=not blocking)
        gpu.launch(stream, cost, self.task, aten.copy_.default)
        if blocking and to_host:
            self.synchronize(tensor)
        elif blocking and nbytes > STAGED:
            gpu.copied_to(self.task, gpu.timeline.mark(stream, self.task.now_s()))
            moved_to_gpu(nbytes)

    def synchronize(self, tensor: Tensor) -> None:
        """Make the host wait for the current stream of *tensor*'s GPU."""
        gpu = self.gpu(tensor.device)
        stream = current_stream(self.task, gpu)
        gpu.synchronize(self.task, gpu.timeline.mark(stream, self.task.now_s()))

    def where(self) -> Reading:
        """Return the user's current line, for a report."""
        from distsim.sim.device.operators.reading import reading

        return reading(sys._getframe(1))


def is_recorded(args: tuple[Any, ...]) -> bool:
    """Return whether autograd records an operator with these arguments, or a backward pass runs it."""
    if _current_graph_task_id() != -1:
        return True
    if not torch.is_grad_enabled():
        return False
    for value in args:
        if isinstance(value, (list, tuple)):
            value = value[0] if value else None  # cat, stack
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def _bytes_of(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


_OVERWRITE = frozenset(
    {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default,
     aten.random_.default, getattr(aten.random_, "from"), aten.random_.to, aten.bernoulli_.float,
     aten.exponential_.default, aten.log_normal_.default, aten.geometric_.default, aten.cauchy_.default}
)  # fmt: skip

_COMPARISONS = frozenset({aten.eq.Tensor, aten.ne.Tensor})
_UNINITIALIZED = frozenset(
    getattr(packet, overload)
    for packet in (aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty,
                   aten.new_empty_strided)
    for overload in packet.overloads() if "out" not in overload
)  # fmt: skip
"""Operators that return uninitialized memory. It reads as zeros here, as new GPU memory usually does."""


def _precision() -> tuple[str, str]:
    """Return the precision that the program allows for products of 32-bit numbers."""
    backends = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


def _not_compiled(function: Any) -> None:
    """Exclude *function* and the functions that it calls from torch.compile.

    Inside a dispatch mode no mode is active, so the compiler would treat them as the user's code.
    """
    leave = leaves_code()
    if leave is not None:
        leave(function.__code__)


_not_compiled(ComputeMode.__torch_dispatch__)
