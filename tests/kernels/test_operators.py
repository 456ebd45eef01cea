"""What the other operators cost: bytes, kernels, kinds, and that nothing of aten fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distsim.errors import NotSimulated
from distsim.kernels import Cost, Gpu
from distsim.kernels.pricing import RULES
from tests.kernels.shapes import meta, priced

aten = torch.ops.aten
F32, I64 = torch.float32, torch.int64


@pytest.fixture
def h100() -> Gpu:
    return Gpu.named("h100")


def test_every_rule_is_of_an_operator_that_torch_has() -> None:
    """A rule with a mistyped name would never be asked."""
    names = {name for name in RULES if name.startswith("aten::")}
    unknown = {name for name in names if not torch._C._jit_get_schemas_for_operator(name)}
    assert unknown == set()


@pytest.mark.parametrize(
    "call",
    [
        (aten.view.default, meta(4, 6), [6, 4]),
        (aten.t.default, meta(4, 6)),
        (aten.expand.default, meta(1, 6), [4, 6]),
        (aten.slice.Tensor, meta(8, 6), 0, 2, 4),
        (aten.detach.default, meta(4)),
        (aten.empty.memory_format, [4, 6]),
        (aten._unsafe_view.default, meta(4, 6), [6, 4]),
        (aten.split.Tensor, meta(8, 6), 2),
    ],
    ids=lambda call: str(call[0]),
)
def test_a_view_is_nothing(h100: Gpu, call: tuple[Any, ...]) -> None:
    """No kernel, no time, no bytes."""
    func, *args = call
    cost = h100.cost(func, tuple(args), {}, func(*args))
    assert (cost.seconds, cost.kernels, cost.nbytes) == (0.0, 0, 0)


def test_an_operator_without_a_rule_moves_its_bytes(h100: Gpu) -> None:
    """Both operands in, one result out; in place as much."""
    x = meta(1024, 1024)
    out = h100.cost(aten.atan2.default, (x, meta(1024, 1024)), {}, meta(1024, 1024))
    assert (out.nbytes, out.kernels, out.kind) == (3 * 2 * 2**20, 1, "elementwise")
    assert h100.cost(aten.mul_.Tensor, (x, x), {}, x).nbytes == 3 * 2 * 2**20
    small = meta(8, dtype=F32)
    assert h100.cost(aten.special_bessel_j0.default, (small,), {}, small).seconds > 0


def test_a_broadcast_operand_is_read_once(h100: Gpu) -> None:
    """What an expanded tensor has in memory, not what it seems to have."""
    x, row = meta(1024, 1024), meta(1, 1024).expand(1024, 1024)
    assert priced(h100, aten.add.Tensor, x, row).nbytes == 2 * (2 * 2**20 + 1024)


@pytest.mark.parametrize("gpu", ["h100", "a100", "b200", "mi300x", "rtx4090"])
def test_more_bytes_never_take_less(gpu: str) -> None:
    """Of every kind of operator."""
    found = Gpu.named(gpu)

    def every(rows: int) -> list[Cost]:
        x, weight = meta(rows, 1024), meta(1024)
        return [
            priced(found, aten.relu.default, x),
            priced(found, aten.sum.dim_IntList, x, [0]),
            priced(found, aten.native_layer_norm.default, x, [1024], weight, weight, 1e-5),
            priced(found, aten._softmax.default, x, 1, False),
            priced(found, aten.cat.default, [x, x]),
            priced(found, aten.embedding.default, meta(5000, 1024), meta(rows, dtype=I64)),
            priced(found, aten._to_copy.default, x, dtype=F32),
            priced(found, aten.sort.default, x),
        ]

    for less, more in zip(every(512), every(4096), strict=True):
        assert less.seconds < more.seconds
        assert less.kind == more.kind


def test_a_fused_optimizer_reads_four_lists_and_writes_three(h100: Gpu) -> None:
    """Gradients are written only when they are unscaled."""
    lists = [[meta(4096, 4096, dtype=F32) for _ in range(8)] for _ in range(4)]
    args = (*lists, [], [meta(dtype=F32) for _ in range(8)])
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False}
    cost = h100.cost(aten._fused_adamw_.default, args, numbers | {"maximize": False}, None)
    assert cost.nbytes == pytest.approx(7 * 8 * 4096 * 4096 * 4, rel=1e-4)
    scaled = numbers | {"maximize": False, "grad_scale": meta(dtype=F32)}
    assert h100.cost(aten._fused_adamw_.default, args, scaled, None).nbytes > 1.1 * cost.nbytes


def test_a_copy_from_the_host_goes_over_pcie(h100: Gpu) -> None:
    """At the pinned rate if it is asynchronous, else at the driver's; between hosts the GPU does nothing."""
    host, device = torch.empty(2**20), meta(2**20, dtype=F32)
    pinned = h100.cost(aten.copy_.default, (device, host, True), {}, device)
    pageable = h100.cost(aten.copy_.default, (device, host), {}, device)
    assert pinned.kind == pageable.kind == "h2d"
    assert 2**22 / h100.spec.host.h2d < pinned.seconds < pageable.seconds
    assert h100.cost(aten._to_copy.default, (device,), {"device": "cpu"}, host).kind == "d2h"
    assert h100.cost(aten.copy_.default, (host, host), {}, host).kernels == 0
    assert h100.cost(aten._local_scalar_dense.default, (device[:1],), {}, 1.0).kind == "d2h"


def test_fsdps_own_copies_have_prices(h100: Gpu) -> None:
    """torch.ops.fsdp is not of aten, and every FSDP2 script calls it."""
    import torch.distributed.fsdp  # registers the operators

    func = torch.ops.fsdp.split_with_sizes_copy.default
    out = [meta(8, 512), meta(8, 512)]
    cost = h100.cost(func, (meta(8, 1024), [512, 512], 1), {"out": out}, None)
    assert cost.nbytes == 2 * 8 * 1024 * 2
    large = meta(4096, 4096)
    times = [
        h100.cost(func, (large, [4096], 1), {"out": [large]}, None).seconds,
        h100.cost(torch.ops.fsdp.chunk_cat.default, ([large], 0, 8), {"out": large}, None).seconds,
        h100.cost(
            torch.ops.fsdp.all_gather_copy_in.default, ([large], large, [4096], 4096, 0), {}, (large, large)
        ).seconds,
    ]
    assert times[:2] == pytest.approx([h100.cost(aten.copy_.default, (large, large), {}, large).seconds] * 2, rel=0.01)
    assert times[2] >= times[0]


@pytest.mark.slow
def test_no_operator_of_aten_fails(h100: Gpu) -> None:
    """Every one that torch has, with an argument of some kind for each of its own."""
    x = meta(2, 4, 8, 16)
    some: dict[str, Any] = {"Tensor": x, "int": 1, "SymInt": 1, "number": 1, "float": 1.0, "bool": False}
    lists: dict[str, Any] = {
        "List[Tensor]": [x, x],
        "List[int]": [1, 1],
        "List[SymInt]": [1, 1],
        "List[bool]": [True] * 4,
    }

    def given(argument: Any) -> Any:
        return lists.get(str(argument.type), some.get(str(argument.type)))

    failed, count = [], 0
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        packet = getattr(aten, name, None) if space == "aten" else None
        func = getattr(packet, schema.overload_name or "default", None)
        if func is None:
            continue
        count += 1
        args = tuple(given(argument) for argument in schema.arguments if not argument.kwarg_only)
        result = tuple(x for each in schema.returns if str(each.type) == "Tensor")
        try:
            assert h100.cost(func, args, {}, result).seconds >= 0
        except Exception as error:
            failed.append(f"{schema.name}.{schema.overload_name}: {error!r}")
    assert failed == []
    assert count > 3000


def test_an_operator_of_elsewhere_is_refused_by_name(h100: Gpu) -> None:
    """With the call that says what it costs."""
    library = torch.library.Library("distsim_unpriced", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    func = torch.ops.distsim_unpriced.twice.default
    with pytest.raises(
        NotSimulated, match=r"distsim_unpriced::twice .*distsim\.kernel_cost\('distsim_unpriced::twice'"
    ):
        h100.cost(func, (meta(4),), {}, meta(4))
