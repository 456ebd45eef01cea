"""Small CUDA programs, as people write them: functions that a rank calls, and that return what a test looks at."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["SNIPPETS"]

SNIPPETS: dict[str, Callable[[], Any]] = {}


def snippet(fn: Callable[[], Any]) -> Callable[[], Any]:
    SNIPPETS[fn.__name__] = fn
    return fn


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()


def _raised(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@snippet
def begins() -> Any:
    seen = [torch.cuda.is_initialized()]
    torch.manual_seed(3)
    torch.cuda.manual_seed_all(4)
    seen += [torch.cuda.is_available(), torch.cuda.is_initialized()]
    torch.cuda.init()
    return [*seen, torch.cuda.is_initialized(), torch.cuda.initial_seed()]


@snippet
def backward() -> Any:
    x = torch.randn(8, 16, device="cuda", requires_grad=True)
    (x @ x.t()).sum().backward()
    assert x.grad is not None
    return str(x.grad.device), tuple(x.grad.shape), x.is_cuda, x.type()


@snippet
def values() -> Any:
    x = torch.arange(6, device="cuda").view(2, 3)
    return x.sum().item(), x.cpu().tolist(), x.tolist(), bool((x > 4).any()), x[1, 2].item()


@snippet
def numpy_is_refused() -> Any:
    return _raised(lambda: torch.zeros(2, device="cuda").numpy())


@snippet
def printing() -> Any:
    torch.cuda.set_device(0)
    known = repr(torch.tensor([1.0, 2.0], device="cuda"))
    return (
        known,
        str(torch.randn(4096, 8, device="cuda") @ torch.randn(8, 4096, device="cuda")),
        f"{torch.ones((), device='cuda'):.1f}",
    )


@snippet
def set_default_device() -> Any:
    torch.set_default_device("cuda")
    try:
        made = torch.zeros(3)
        other = torch.empty(2)
    finally:
        torch.set_default_device(None)
    with torch.device("cuda:1"):
        third = nn.Linear(2, 2)
    return str(made.device), str(other.device), str(third.weight.device)


@snippet
def meta_then_to_empty() -> Any:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    model = model.to_empty(device="cuda")
    with torch.no_grad():
        nn.init.zeros_(model.bias)
    return str(model.weight.device), model.bias.sum().item()


@snippet
def training_step() -> Any:
    found = []
    for make in (
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
    ):
        model = _model()
        optimizer = make(model.parameters())
        loss = F.mse_loss(model(torch.randn(4, 16, device="cuda")), torch.zeros(4, 4, device="cuda"))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(next(model.parameters()).grad is not None)
    return found


@snippet
def autocast() -> Any:
    model = _model()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        one = model(torch.randn(4, 16, device="cuda"))
        loss = F.mse_loss(one, torch.zeros(4, 4, device="cuda"))
    with torch.autocast("cuda"):
        other = model(torch.randn(4, 16, device="cuda"))
    with torch.cuda.amp.autocast():
        third = model(torch.randn(4, 16, device="cuda"))
    return str(one.dtype), str(loss.dtype), str(other.dtype), str(third.dtype)


def _scaled(scaler: Any, steps: int, gradient: float | None) -> list[float]:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(steps):
        if gradient is None:
            weight.grad = torch.empty(1 << 14, device="cuda").normal_().add_(1)[:4]
        else:
            weight.grad = torch.full((4,), gradient, device="cuda")
        scaler.scale(torch.ones((), device="cuda"))
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@snippet
def grad_scaler() -> Any:
    grows = _scaled(torch.amp.GradScaler("cuda", growth_interval=3), 3, None)
    shrinks = _scaled(torch.cuda.amp.GradScaler(), 1, float("inf"))
    stays = _scaled(torch.amp.GradScaler("cuda"), 2, None)
    return grows, shrinks, stays


@snippet
def grad_scaler_training() -> Any:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", growth_interval=2)
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(4, 16, device="cuda")).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale()


@snippet
def attention() -> Any:
    def run(dtype: torch.dtype, **given: Any) -> Any:
        q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, **given)
        out.sum().backward()
        return type(out.grad_fn).__name__, tuple(q.grad.shape), tuple(out.shape)

    mask = torch.ones(128, 128, device="cuda", dtype=torch.bool).tril()
    found = [run(torch.bfloat16, is_causal=True), run(torch.float32), run(torch.bfloat16, attn_mask=mask)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found.append(run(torch.bfloat16, is_causal=True))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        found.append(run(torch.bfloat16))
    return found


@snippet
def grouped_attention() -> Any:
    q = torch.randn(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return tuple(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).shape)


@snippet
def encoder_layer() -> Any:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda()
    x = torch.randn(2, 16, 64, device="cuda")
    layer(x).sum().backward()
    layer.eval()
    with torch.no_grad():
        return tuple(layer(x).shape)


@snippet
def convolution() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).cuda()
    out = model(torch.randn(2, 3, 16, 16, device="cuda"))
    out.sum().backward()
    return tuple(out.shape)


@snippet
def recurrent() -> Any:
    model = nn.LSTM(8, 16, 2, batch_first=True).cuda()
    out, (h, c) = model(torch.randn(2, 5, 8, device="cuda"))
    out.sum().backward()
    return tuple(out.shape), tuple(h.shape), tuple(c.shape)


@snippet
def embedding_and_loss() -> Any:
    table = nn.Embedding(100, 16).cuda()
    head = nn.Linear(16, 100).cuda()
    ids = torch.randint(0, 100, (2, 8), device="cuda")
    loss = F.cross_entropy(head(table(ids)).view(-1, 100), ids.view(-1))
    loss.backward()
    return loss.item() == loss.item(), table.weight.grad is not None


@snippet
def checkpointing() -> Any:
    from torch.utils.checkpoint import checkpoint

    model = _model()
    found = []
    for reentrant in (True, False):
        x = torch.randn(4, 16, device="cuda", requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        found.append(x.grad is not None)
    return found


@snippet
def loader() -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
    found = []
    for x, y in DataLoader(data, batch_size=4, pin_memory=True):
        found += [x.is_pinned(), x.cuda(non_blocking=True).sum().item(), str(y.to("cuda", non_blocking=True).device)]
    return found


@snippet
def streams() -> Any:
    side = torch.cuda.Stream()
    x = torch.randn(2048, 2048, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        inside = torch.cuda.current_stream() == side
        y = x @ x
        y.record_stream(torch.cuda.default_stream())
        event = side.record_event()
    waited = event.query()
    torch.cuda.current_stream().wait_event(event)
    torch.cuda.synchronize()
    return inside, waited, event.query(), side.query(), torch.cuda.current_stream() == torch.cuda.default_stream()


@snippet
def generic_streams() -> Any:
    side = torch.Stream(device="cuda")
    before = torch.accelerator.current_stream()
    with side:
        inside = torch.accelerator.current_stream() == side
        torch.randn(512, 512, device="cuda").sum()
        event = side.record_event()
    event.synchronize()
    start, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
    start.record()
    torch.randn(4096, 4096, device="cuda").sum()
    end.record()
    torch.accelerator.synchronize()
    return inside, event.query(), torch.accelerator.current_stream() == before, start.elapsed_time(end) > 0


@snippet
def backward_follows_forward() -> Any:
    side = torch.cuda.Stream()
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        y = (x @ x).sum()
    seen = []
    y.grad_fn.register_hook(lambda *_: seen.append(torch.cuda.current_stream() == side))
    torch.cuda.current_stream().wait_stream(side)
    y.backward()
    return seen, torch.cuda.current_stream() == torch.cuda.default_stream()


@snippet
def event_errors() -> Any:
    plain, timed, other = torch.cuda.Event(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = [_raised(lambda: plain.elapsed_time(timed)), _raised(lambda: timed.elapsed_time(other))]
    timed.record()
    torch.randn(8192, 8192, device="cuda").sum()
    other.record()
    found.append(_raised(lambda: timed.elapsed_time(other)))
    found.append(_raised(timed.ipc_handle))
    found.append(_raised(lambda: torch.cuda.ExternalStream(1234)))
    while not other.query():
        pass
    return found, timed.elapsed_time(other) > 0


@snippet
def memory() -> Any:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_allocated() - before
    y = torch.empty(100, device="cuda")
    small = torch.cuda.memory_allocated() - before - held
    reserved = torch.cuda.memory_reserved()
    del x, y
    left, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats()
    summary = torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    return {
        "held": held, "small": small, "left": left, "peak": peak, "reserved": reserved, "kept": kept,
        "after": torch.cuda.memory_reserved(), "stats": stats["allocation.all.allocated"] >= 2,
        "summary": "PyTorch CUDA memory summary" in summary, "free": 0 < free < total,
        "accelerator": torch.accelerator.memory_allocated() == torch.cuda.memory_allocated(),
    }  # fmt: skip


@snippet
def out_of_memory() -> Any:
    kind, text = _raised(lambda: torch.empty(1 << 40, device="cuda"))
    torch.cuda.set_per_process_memory_fraction(0.5)
    half = _raised(lambda: torch.empty(60 << 30, dtype=torch.uint8, device="cuda"))
    torch.cuda.set_per_process_memory_fraction(1.0)
    return kind, text.splitlines()[0][:60], half[0], torch.cuda.memory_stats()["num_ooms"]


@snippet
def crossing_devices() -> Any:
    return (
        _raised(lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")),
        _raised(lambda: torch.ones(2, device="cuda:0") + torch.ones(2)),
        _raised(lambda: torch.ones(2, device="cuda:9")),
        _raised(lambda: torch.cuda.set_device(9)),
        str((torch.ones(2, device="cuda:0") + torch.tensor(1.0)).device),
    )


@snippet
def seeds() -> Any:
    torch.cuda.manual_seed(7)
    one = torch.rand(3, device="cuda").tolist()
    state = torch.cuda.get_rng_state()
    two = torch.rand(3, device="cuda").tolist()
    torch.cuda.set_rng_state(state)
    again = torch.rand(3, device="cuda").tolist()
    with torch.random.fork_rng(devices=[0]):
        torch.rand(3, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(7)
    own = torch.rand(3, device="cuda", generator=generator).tolist()
    torch.manual_seed(7)
    all_of_them = torch.rand(3, device="cuda").tolist()
    return {
        "again": two == again, "seed": torch.cuda.initial_seed(), "generator": own == one, "all": all_of_them == one,
        "device": str(generator.device), "is": isinstance(torch.default_generator, torch.Generator),
        "state": state.numel(), "states": len(torch.cuda.get_rng_state_all()),
    }  # fmt: skip


@snippet
def properties() -> Any:
    found = torch.cuda.get_device_properties(0)
    return (
        found.name, torch.cuda.get_device_name(), torch.cuda.get_device_capability(), found.total_memory > 70e9,
        found.multi_processor_count, torch.cuda.is_bf16_supported(), torch.version.cuda,
        "sm_90" in torch.cuda.get_arch_list(),
        torch.backends.cudnn.is_available(), torch.backends.cuda.is_built(), torch.cuda.nccl.version()[0],
    )  # fmt: skip


@snippet
def flags() -> Any:
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    seen = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    return *seen, torch.cuda.is_tf32_supported(), torch.backends.cuda.flash_sdp_enabled()


@snippet
def accelerator() -> Any:
    found = torch.accelerator
    found.set_device_index(1)
    index, there = found.current_device_index(), torch.empty(1, device="cuda").get_device()
    with found.device_index(0):
        inner = torch.cuda.current_device()
    found.set_device_index(0)
    return str(found.current_accelerator()), found.device_count(), found.is_available(), index, there, inner


@snippet
def devices() -> Any:
    torch.cuda.set_device("cuda:1")
    seen = [torch.cuda.current_device(), torch.empty(1, device="cuda").get_device()]
    with torch.cuda.device(0):
        seen.append(torch.empty(1, device="cuda").get_device())
    x = torch.empty(1, device="cuda:2")
    with torch.cuda.device_of(x):
        seen.append(torch.cuda.current_device())
    torch.cuda.set_device(0)
    return [
        *seen,
        torch.device("cuda") == torch.device("cuda"),
        x.cuda(0).get_device(),
        torch.empty(1).cuda().get_device(),
    ]


@snippet
def save_and_load() -> Any:
    model = _model()
    model[0].weight.data = torch.arange(512.0, device="cuda").view(32, 16)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 3, "big": torch.randn(512, 512, device="cuda")}, file)
    found = []
    for where in ("cuda:0", "cpu", None, {"cuda:0": "cuda:1"}, torch.device("cuda")):
        file.seek(0)
        loaded = torch.load(file, map_location=where, weights_only=True)
        weight = loaded["model"]["0.weight"]
        found.append((str(weight.device), weight.sum().item(), tuple(loaded["big"].shape)))
    model.load_state_dict(loaded["model"])
    return found


@snippet
def storages() -> Any:
    x = torch.arange(8.0, device="cuda")
    storage = x.untyped_storage()
    view = x[2:]
    seen = [storage.nbytes(), storage.size(), str(storage.device), storage.cpu().nbytes(), len(storage)]
    seen += [x.data_ptr() % 512, view.data_ptr() - x.data_ptr(), storage.data_ptr() == x.data_ptr(), x.data_ptr() > 0]
    other = torch.empty(1024, device="cuda")
    held = torch.cuda.memory_allocated()
    other.untyped_storage().resize_(0)
    freed = held - torch.cuda.memory_allocated()
    seen += [other.untyped_storage().size(), freed]
    other.untyped_storage().resize_(4096)
    return [*seen, held - torch.cuda.memory_allocated(), torch.empty(0, device="cuda").data_ptr(), x.storage().size()]


@snippet
def pinned() -> Any:
    x = torch.ones(4)
    y = x.pin_memory()
    z = torch.empty(4, pin_memory=True)
    return x.is_pinned(), y.is_pinned(), z.is_pinned(), y.tolist(), torch.ones(2, device="cuda").is_pinned()


@snippet
def masks() -> Any:
    x = torch.arange(6.0, device="cuda")
    picked = x[x > 2]
    x[x > 4] = 0
    return picked.tolist(), x.sum().item(), bool(torch.isfinite(x).all()), torch.where(x > 1)[0].tolist()


@snippet
def vmapped() -> Any:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    grad = torch.func.grad(lambda y: (y * y).sum())(x)
    return torch.vmap(lambda row: row.sum())(x).tolist(), grad.tolist()


@snippet
def compiled() -> Any:
    model = torch.compile(_model())

    @torch.compile(mode="max-autotune")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return tuple(model(torch.randn(4, 16, device="cuda")).shape), twice(torch.ones(2, device="cuda")).tolist()


@snippet
def graphs() -> Any:
    return (
        torch.cuda.is_current_stream_capturing(),
        _raised(torch.cuda.CUDAGraph),
        _raised(lambda: torch.cuda.make_graphed_callables(_model(), (torch.randn(4, 16, device="cuda"),))),
    )


@snippet
def ranges() -> Any:
    torch.cuda.nvtx.range_push("step")
    with torch.cuda.nvtx.range("inner"):
        torch.cuda.nvtx.mark("here")
    torch.cuda.nvtx.range_pop()
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    with torch.autograd.profiler.emit_nvtx():
        torch.ones(2, device="cuda").sum()
    return True


@snippet
def refusals() -> Any:
    return {
        "utilization": _raised(torch.cuda.utilization),
        "alloc": _raised(lambda: torch.cuda.caching_allocator_alloc(1024)),
        "snapshot": _raised(torch.cuda.memory_snapshot),
        "blas": _raised(torch.cuda.current_blas_handle),
    }


@snippet
def deep_copies() -> Any:
    import copy

    model = _model()
    twin = copy.deepcopy(model)
    x = torch.arange(3.0, device="cuda")
    y = x.clone()
    y += 1
    return str(twin[0].weight.device), x.tolist(), y.tolist(), x.to("cuda") is x, x.new_zeros(2).tolist()


@snippet
def moves() -> Any:
    model = nn.Linear(4, 4)
    there = model.to("cuda", dtype=torch.bfloat16)
    back = there.cpu()
    x = torch.ones(3).to("cuda:1").to("cuda:0").cpu()
    return str(there.weight.dtype), str(back.weight.device), x.tolist(), torch.ones(2).cuda().half().type()


@snippet
def quiet() -> Any:
    """No warning that a CUDA build would not give."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            pass
        next(iter(torch.utils.data.DataLoader([torch.ones(1)], pin_memory=True)))
        torch.cuda.empty_cache()
    return [str(one.message) for one in caught]


@snippet
def arguments_in_place() -> Any:
    x = torch.zeros(4, device="cuda")
    torch.add(x, 1, out=x)
    x.clamp_(max=0.5).mul_(2)
    x.copy_(torch.arange(4.0), non_blocking=True)
    host = torch.empty(4)
    host.copy_(x)
    return x.tolist(), host.tolist()


@snippet
def elapsed_is_the_cost() -> Any:
    """A product between two events on a busy stream takes what the cost model says, and the gap before it."""
    from distsim.kernels import Gpu

    x = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        x @ x
    start.record()
    x @ x
    end.record()
    end.synchronize()
    twin = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    gpu = Gpu.named("h100-sxm")
    cost = gpu.cost(torch.ops.aten.mm.default, (twin, twin), {}, twin)
    return abs(start.elapsed_time(end) - 1e3 * (cost.seconds + gpu.gap_s)) < 1e-9, cost.seconds > 1e-4


@snippet
def an_event_is_recorded_again() -> Any:
    event, side = torch.cuda.Event(), torch.cuda.Stream()
    unrecorded = event.query()
    torch.randn(8192, 8192, device="cuda").sum()
    event.record()
    pending = event.query()
    event.record(side)
    event.synchronize()
    other = torch.cuda.Event()
    other.record(torch.cuda.Stream(device=1))
    elsewhere = _raised(lambda: other.record(torch.cuda.Stream(device=0)))
    return unrecorded, pending, event.query(), str(event.device), elsewhere


@snippet
def many_streams() -> Any:
    """CUDA's pools: 32 streams of a priority, then the first again."""
    made = [torch.cuda.Stream() for _ in range(33)]
    urgent = torch.cuda.Stream(priority=-9)
    return len({s.cuda_stream for s in made}), made[0] == made[32], urgent.priority, torch.cuda.Stream.priority_range()


@snippet
def record_stream_keeps_memory() -> Any:
    """A block that another stream uses is not given away before that stream has come to its end."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    side = torch.cuda.Stream()
    x = torch.empty(64 << 20, device="cuda", dtype=torch.uint8)
    with torch.cuda.stream(side):
        for _ in range(8):
            x.bitwise_not_()
        x.record_stream(side)
    before = x.data_ptr()
    del x
    fresh = torch.empty(64 << 20, device="cuda", dtype=torch.uint8)
    stats = torch.cuda.memory_stats()
    active = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
    apart = fresh.data_ptr() != before
    del fresh
    side.synchronize()
    again = {torch.empty(64 << 20, device="cuda", dtype=torch.uint8).data_ptr() for _ in range(2)}
    return apart, active, bool(again)


@snippet
def growing_a_storage() -> Any:
    x = torch.arange(4, device="cuda")
    x.untyped_storage().resize_(1 << 20)
    y = torch.empty(0, device="cuda").set_(x.untyped_storage(), 0, (1 << 18,), (1,))
    x.resize_(8)
    return x.untyped_storage().size(), tuple(y.shape), tuple(x.shape)


@snippet
def a_generator_of_the_host() -> Any:
    return _raised(lambda: torch.randn(3, device="cuda", generator=torch.Generator()))


@snippet
def lstm_and_other_modules() -> Any:
    x = torch.randn(2, 8, 16, device="cuda")
    made = [nn.GRU(16, 16).cuda()(x)[0], nn.MultiheadAttention(16, 4, batch_first=True).cuda()(x, x, x)[0]]
    made += [nn.LayerNorm(16).cuda()(x), nn.GroupNorm(2, 8).cuda()(x), nn.Dropout(0.5)(x), nn.RMSNorm(16).cuda()(x)]
    return [tuple(one.shape) for one in made]


@snippet
def set_visible_devices() -> Any:
    """Before the first use only; here it is too late."""
    import os

    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    return torch.cuda.device_count()
