"""Known values of simulated tensors, stored on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from distsim.errors import DistsimError, NotSimulated
from distsim.sim.device.allocator.host_memory import erase, filled
from distsim.sim.device.operators.plan import limit
from distsim.sim.device.operators.reading import INTEGER, routed
from distsim.sim.kernel.task import MANY_LOOKS
from distsim.text.distributions import EVEN, Lengths, RouterChoice, Routing
from distsim.torch_compat.device import CONJ, DISABLE_TORCH_DISPATCH, NEG_VIEW

if TYPE_CHECKING:
    from distsim.sim.device.operators.reading import Reading

# -- What only a GPU's kernels compute, on the host: recurrent cells and SyncBatchNorm, by their kernels' formulas.
#
# Sources: aten/src/ATen/native/cuda/RNN.cu and Normalization.cuh (torch 2.13). Sums are made in float32 for half
# precision, as there (`acc_type`).

Parts = list[Tensor | None]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return _wide(gates) if bias is None else _wide(gates) + _wide(bias)


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Parts:  # fmt: skip
    """Return (state, cell, the gates after their functions)."""
    i, f, g, o = (_with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * _wide(cx) + i * g
    return [o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)]


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> Parts:
    """Return (gradients of the gates, of the cell, of a bias)."""
    i, f, g, o = _wide(workspace).chunk(4, 1)
    shape = _wide(torch.zeros_like(cx))
    gh, gc = (shape if each is None else _wide(each) for each in (grad_hy, grad_cy))
    squashed = _wide(cy).tanh()
    gcx = gh * o * (1 - squashed * squashed) + gc
    gates = torch.cat(
        [gcx * g * (1 - i) * i, gcx * _wide(cx) * (1 - f) * f, gcx * i * (1 - g * g), gh * squashed * (1 - o) * o], 1
    )
    return [gates, gcx * f, gates.sum(0) if has_bias else None]


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Parts:  # fmt: skip
    """Return (state, workspace: the gates after their functions, the state before, the hidden part of the new one)."""
    ir, iz, new = _with_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new, before = (new + r * hn).tanh(), _wide(hx)
    return [new + z * (before - new), torch.cat([r, z, new, before, hn], 1)]


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Parts:
    """Return (gradients of the input's gates, of the hidden ones, of the state, of both biases)."""
    r, z, new, before, hn = _wide(workspace).chunk(5, 1)
    go = _wide(grad_hy)
    gz = go * (before - new) * (1 - z) * z
    gn = go * (1 - z) * (1 - new * new)
    gr = gn * hn * (1 - r) * r
    inputs, hidden = torch.cat([gr, gz, gn], 1), torch.cat([gr, gz, gn * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return [inputs, hidden, go * z, *biases]


def _by_channel(x: Tensor) -> Tensor:
    """Return *x* as (channels, everything else)."""
    return _wide(x).transpose(0, 1).reshape(x.shape[1], -1)


def _along(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> Parts:
    rows = _by_channel(x)
    return [rows.mean(1), (rows.var(1, unbiased=False) + eps).rsqrt()]


def batch_norm_gather(
    x: Tensor, means: Tensor, inverses: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor,
) -> Parts:  # fmt: skip
    """Return (mean, inverse deviation) of all ranks; the running ones are updated in place."""
    shares = counts.to(means.dtype).reshape(-1, 1)
    total = shares.sum()
    mean = (means * shares).sum(0) / total
    squares = ((inverses**-2 - eps + (means - mean) ** 2) * shares).sum(0)
    for running, now in ((running_mean, mean), (running_var, squares / (total - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
    return [mean, (squares / total + eps).rsqrt()]


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Parts:
    out = (_wide(x) - _along(mean, x)) * _along(inverse, x)
    if weight is not None:
        out = out * _along(_wide(weight), x)
    return [out if bias is None else out + _along(_wide(bias), x)]


def batch_norm_backward_reduce(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, input_g: bool, weight_g: bool,
    bias_g: bool,
) -> Parts:  # fmt: skip
    """Return (sum of the gradient, of it times the distance from the mean, gradients of weight and bias)."""
    rows = _by_channel(gradient)
    sums, products = rows.sum(1), (rows * (_by_channel(x) - mean.reshape(-1, 1))).sum(1)
    return [sums, products, products * inverse, sums]


def batch_norm_backward_elemt(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, sums: Tensor, products: Tensor,
    counts: Tensor,
) -> Parts:  # fmt: skip
    total = counts.sum().to(sums.dtype)
    scale = inverse if weight is None else inverse * _wide(weight)
    slope = inverse**2 * products / total
    away = _wide(gradient) - _along(sums / total, x) - (_wide(x) - _along(mean, x)) * _along(slope, x)
    return [away * _along(scale, x)]


# -- The values of tensors on a simulated GPU, where they are known: a shadow on the host for each storage.
#
# A shadow is kept where the values came from the host or from a factory and are few (`plan.limit`), and follows every
# operator whose inputs all have one. One unknown input makes the result unknown; a single unknown number is a guess,
# `Values.placeholder`, and what is computed from guesses is one, too. Reading a guess or an unknown value is counted.

_conj = CONJ.get()
_neg_view = NEG_VIEW.get()

KNOWLEDGE = ("_distsim_shadow", "_distsim_truth", "_distsim_typical", "_distsim_lengths")
"""Attributes of a storage that describe its values: known values, guesses about unknown truths and draws
(special.py), and lengths of its rows (uneven.py).
"""
_set_ = torch.Tensor.set_
_empty = torch.empty
_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()
_conj, _neg_view = _conj, _neg_view
_HOST = torch.device("cpu")


class Shadow:
    """The bytes of a storage of the simulated GPU."""

    __slots__ = ("data", "guess")

    def __init__(self, data: torch.UntypedStorage, guess: bool | str = False) -> None:
        self.data = data
        self.guess = guess
        """Computed from a placeholder; the name of the reader if it was drawn (uneven.py)."""


class Pending:
    """A collective that has not met yet will write here; *force* waits for it."""

    __slots__ = ("force",)

    def __init__(self, force: Callable[[], None]) -> None:
        self.force = force


@dataclass(frozen=True, slots=True)
class ValuePolicy:
    """Which values on GPUs are known, and how kernels are priced."""

    real: bool = False
    """Whether all values are known (`--data real`), because every operator is also computed on the host."""
    placeholder: float = 1.0
    """Value of an unknown floating-point number; unknown integers are 0."""
    fuse: bool = False
    """Whether functions under torch.compile are priced as fused kernels (`--fuse`)."""
    strict_kernels: bool = False
    """Whether a Triton kernel without a declared cost is refused (`--strict-kernels`)."""
    libraries: frozenset[str] | None = None
    """GPU libraries that can be imported; None: those whose ImportError the program does not catch."""
    routing: Routing = EVEN
    """Distribution of unknown choices of experts (`--routing`)."""
    lengths: Lengths | None = None
    """Distribution of unknown lengths of sequences (`--lengths`); None: they stay unknown."""
    seed: int = 0
    SHAPES: ClassVar[ValuePolicy]


ValuePolicy.SHAPES = ValuePolicy()


_EXPLAINED = "distsim:"


class Values:
    """Known values on the GPUs of one process."""

    def __init__(self, data: ValuePolicy) -> None:
        self.placeholder = data.placeholder
        self.everything = data.real
        self.routing, self.lengths, self.seed = data.routing, data.lengths, data.seed
        self.routed = routed(data.routing)
        """Name of the reader of drawn choices."""
        self.cut = f"lengths {'' if data.lengths is None else data.lengths.text} (no values)"
        """Name of the reader of drawn lengths."""
        self.choices: dict[int, RouterChoice] = {}
        """Last unknown choice of experts, by their number."""
        self.batches = 0
        """Number of batches whose lengths were drawn."""
        self.reads: dict[tuple[str, Reading], int] = {}
        """Number of reads of unknown values by (reader, line)."""
        self.written: list[weakref.ref[torch.UntypedStorage]] | None = None
        """Storages that were written to since a capture began; None: nothing is captured."""
        self.empty_mask: Reading | None = None
        """The last line at which a mask of unknown values selected nothing."""
        self._counted: Reading | None = None
        self._in_row = 0
        """The last reading that was counted, and how many times in a row."""
        self._last: tuple[object, int] = (None, 0)
        self._times = 0

    def shadow(self, tensor: Tensor) -> Shadow | None:
        storage = tensor.untyped_storage()
        held: Shadow | Pending | None = storage.__dict__.get("_distsim_shadow")
        if isinstance(held, Pending):
            held.force()
            held = storage.__dict__.get("_distsim_shadow")
            if isinstance(held, Pending):
                return None
        return held

    def host(self, tensor: Tensor) -> Tensor | None:
        """Return *tensor* on the host, sharing its values; None if they are unknown. An unknown single number is
        guessed.
        """
        if tensor.is_cpu:
            return tensor
        shadow = self.shadow(tensor)
        if shadow is None and tensor.numel() == 1 and not self.everything and tensor.is_cuda:
            if tensor.untyped_storage().nbytes() == tensor.element_size():
                self.know(tensor, self._placeholders(tensor), guess=True)
                shadow = self.shadow(tensor)
        return None if shadow is None else _over(shadow, tensor)

    def guessed(self, tensor: Tensor) -> bool | str:
        """Return whether the values of *tensor* are guesses; the name of the reader if they were drawn."""
        shadow = None if tensor.is_cpu else self.shadow(tensor)
        return shadow is not None and shadow.guess

    def keeps(self, numel: int, dtype: torch.dtype) -> bool:
        return self.everything or numel <= limit(dtype)

    def know(self, tensor: Tensor, host: Tensor, guess: bool | str = False) -> None:
        """Set the values of *tensor* to those of *host*, which nothing else writes to."""
        storage = tensor.untyped_storage()
        if self.written is not None:
            self.written.append(weakref.ref(storage))
        data = host.untyped_storage()
        if (
            host.stride() != tensor.stride()
            or host.storage_offset() != tensor.storage_offset()
            or (data.nbytes() < storage.nbytes())
            or _is_lazy(host)
            or _is_lazy(tensor)
        ):
            fresh = Shadow(torch.UntypedStorage(storage.nbytes(), device="cpu"))
            _over(fresh, tensor).copy_(host)
            data = fresh.data
        storage._distsim_shadow = Shadow(data, guess)

    def write(self, tensor: Tensor, host: Tensor | None, guess: bool | str = False) -> None:
        """Write the values of *host* (None: unknown) to *tensor*, which may be a part of its storage."""
        shadow = self.shadow(tensor)
        if host is None:
            self.forget(tensor)
            return
        if self.written is not None:
            self.written.append(weakref.ref(tensor.untyped_storage()))
        if shadow is None:
            storage = tensor.untyped_storage()
            for name in KNOWLEDGE[1:]:
                storage.__dict__.pop(name, None)
            if tensor.numel() * tensor.element_size() == storage.nbytes() and self.keeps(tensor.numel(), tensor.dtype):
                self.know(tensor, host.detach().to(tensor.dtype, copy=True).expand(tensor.shape), guess)
            return
        _over(shadow, tensor).copy_(host)
        shadow.guess = shadow.guess or guess

    def forget(self, tensor: Tensor) -> None:
        """Mark the values of *tensor*'s storage as unknown."""
        space = tensor.untyped_storage().__dict__
        for name in KNOWLEDGE:
            space.pop(name, None)

    def pend(self, tensor: Tensor, force: Callable[[], None]) -> None:
        tensor.untyped_storage()._distsim_shadow = Pending(force)

    def number(self, dtype: torch.dtype) -> float:
        return self.placeholder if dtype.is_floating_point or dtype.is_complex else 0

    def _placeholders(self, tensor: Tensor) -> Tensor:
        number = self.number(tensor.dtype)
        if tensor.dtype is torch.bool:
            number = tensor.untyped_storage().__dict__.get("_distsim_truth") in (True, "always")
        return filled(tensor.shape, number, tensor.dtype)

    def count(self, reader: str, where: Callable[[], Reading]) -> None:
        """Count a read of unknown values.

        Raises:
            NotSimulated: A loop may wait for such a value for ever.
        """
        reading = where()
        passes = self.reads[reader, reading] = self.reads.get((reader, reading), 0) + 1
        self._in_row = self._in_row + 1 if self._counted == reading else 1
        self._counted = reading
        if (self._in_row if reading.in_library else passes) == reading.most_passes:
            raise NotSimulated(
                f"a `while` that only {reading.expression or 'a value on the GPU'} ends, at {reading.where} (read "
                f"{passes} times; nobody knows it, placeholder {self.placeholder:g})",
                "end it by a number of steps as well, give a --placeholder that ends it, or compute with --data real",
            )

    def explain_empty(self, error: Exception, tensors: list[Tensor]) -> Exception | None:
        """Return *error* of an operator on *tensors* with the mask of unknown values that left one of them empty, and
        a remedy; None if no such mask was used.
        """
        line = self.empty_mask
        if (
            line is None
            or isinstance(error, DistsimError)
            or _EXPLAINED in str(error)
            or all(tensor.numel() for tensor in tensors)
        ):
            return None
        return type(error)(
            f"{error} ({_EXPLAINED} {line.expression or 'a mask'} at {line.where} selects nothing, because nobody "
            "knows its values: skip an empty selection, or compute with --data real)"
        )

    def awaits(self, value: object, num_calls: int, where: Callable[[], Reading]) -> Reading | None:
        """Return the line that reads *value*, if it was equal many times in a row and a loop continues while it is;
        else None.

        *num_calls* is the number of calls that the host has made with other ranks so far.
        """
        if self._last != (value, num_calls):
            self._last, self._times = (value, num_calls), 0
        self._times += 1
        if self._times <= MANY_LOOKS:
            return None
        reading = where()
        return reading if reading.fixed else None

    def read(self, tensor: Tensor, reader: str, where: Callable[[], Reading]) -> Tensor:
        """Return a copy of *tensor* on the host; unknown values are placeholders, and the read is counted."""
        host = self.host(tensor)
        guess = self.guessed(tensor)
        if host is None or guess:
            if tensor.dtype is not torch.bool and not self.number(tensor.dtype) and (host is None or not host.any()):
                reader = INTEGER
            self.count(guess if isinstance(guess, str) else reader, where)
        if host is None:
            return self._placeholders(tensor)
        return host.clone()

    def read_into(self, target: Tensor, tensor: Tensor, reader: str, where: Callable[[], Reading]) -> bool:
        """Read as `read` into *target* on the host. Return whether the values were known."""
        known = self.host(tensor) is not None
        if (
            known
            or target.dtype is torch.bool
            or self.number(tensor.dtype)
            or not target.is_contiguous()
            or target.shape != tensor.shape
        ):
            target.copy_(self.read(tensor, reader, where))
        else:
            self.count(reader, where)
            erase(target)
        return known


def _is_lazy(tensor: Tensor) -> bool:
    """Return whether the tensor's numbers are not those of its storage.

    They are conjugates or negatives, or zeros without memory (`_efficientzerotensor`, which torch uses for
    tangents).
    """
    return bool(tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())


def _over(shadow: Shadow, tensor: Tensor) -> Tensor:
    """Return the known values of *tensor*. The rank is not charged for what only the simulator does."""
    with _DisableTorchDispatch():
        view = _set_(
            _empty(0, dtype=tensor.dtype, device=_HOST),
            shadow.data,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        if tensor.is_conj():
            view = _conj(view)
        return _neg_view(view) if tensor.is_neg() else view
