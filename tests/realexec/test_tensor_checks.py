"""The opt-in looks at a call's tensors never raise in the program, whatever kind of tensor it sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distsim.debug.rings import layout as rings
from distsim.realexec.guard.tensor_checks import Checksums, find_nan

NAN = float("nan")
ONES = torch.ones(3)
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex32,
    torch.bool,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # from torch 2.7 on
]
KINDS: dict[str, Any] = {
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": ONES.to_mkldnn,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "empty": lambda: torch.empty(0),
    "expanded": lambda: torch.ones(1).expand(4),
    "grad": lambda: torch.nn.Parameter(torch.ones(3)),
    **{str(dtype): (lambda dtype=dtype: ONES.to(dtype)) for dtype in DTYPES},
}


class Ring:
    """What was marked."""

    rank = 0

    def __init__(self) -> None:
        self.marked: list[int] = []

    def mark(self, index: int, flags: int) -> None:
        self.marked.append(flags)


def called(op: str, tensors: list[Any]) -> Any:
    return SimpleNamespace(key=(op, None, None, None, None, 0), inputs=tensors, outputs=tensors)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather_single"])
def test_any_kind_of_tensor_may_be_sent(op: str, kind: str) -> None:
    """Neither look raises, nor finds anything where nothing is; what was in the buffer is there afterwards."""
    ring, tensor = Ring(), KINDS[kind]()
    recorder: Any = SimpleNamespace(ring=ring)
    said = called(op, [tensor])
    find_nan(recorder, said, 0, 0)
    args, after = Checksums(recorder).begin(said, 0, (said.outputs, None), 0)
    assert args[1] is None
    if after is not None:
        after()
    assert not ring.marked


WITH_NAN: dict[str, Any] = {
    "plain": lambda: torch.tensor([1, NAN]),
    "sparse": lambda: torch.tensor([1, NAN]).to_sparse(),
    "csr": lambda: torch.tensor([[1, NAN]]).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])]),
    "complex": lambda: torch.tensor([1, complex(0, NAN)]),
    "float8": lambda: torch.tensor([1, NAN]).to(torch.float8_e4m3fn),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WITH_NAN)
def test_nan_is_found_in_any_kind(kind: str) -> None:
    """Where the numbers are not in the tensor itself, too."""
    ring = Ring()
    recorder: Any = SimpleNamespace(ring=ring)
    find_nan(recorder, called("all_reduce", [WITH_NAN[kind]()]), 0, 0)
    assert ring.marked == [rings.NAN_INPUT]
