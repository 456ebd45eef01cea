"""Small CUDA programs about devices, streams, events, memory and seeds."""

from __future__ import annotations

import time
from typing import Any

import torch
from device.collected import raised, small_model, snippet


@snippet
def begins() -> Any:
    seen = [torch.cuda.is_initialized()]
    torch.manual_seed(3)
    torch.cuda.manual_seed_all(4)
    seen += [torch.cuda.is_available(), torch.cuda.is_initialized()]
    torch.cuda.init()
    return [*seen, torch.cuda.is_initialized(), torch.cuda.initial_seed()]


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
def backward_joins_its_streams() -> Any:
    """Autograd lets the stream that called backward wait for those that backward ran on."""
    side = torch.cuda.Stream()
    x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        y = x
        for _ in range(4):
            y = y @ x
        y = y.sum()
    y.backward()
    busy = not side.query()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return busy, side.query()


@snippet
def event_errors() -> Any:
    plain, timed, other = torch.cuda.Event(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = [raised(lambda: plain.elapsed_time(timed)), raised(lambda: timed.elapsed_time(other))]
    timed.record()
    torch.randn(8192, 8192, device="cuda").sum()
    other.record()
    found.append(raised(lambda: timed.elapsed_time(other)))
    found.append(raised(timed.ipc_handle))
    found.append(raised(lambda: torch.cuda.ExternalStream(1234)))
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
    kind, text = raised(lambda: torch.empty(1 << 40, device="cuda"))
    torch.cuda.set_per_process_memory_fraction(0.5)
    half = raised(lambda: torch.empty(60 << 30, dtype=torch.uint8, device="cuda"))
    torch.cuda.set_per_process_memory_fraction(1.0)
    return kind, text.splitlines()[0][:60], half[0], torch.cuda.memory_stats()["num_ooms"]


@snippet
def crossing_devices() -> Any:
    return (
        raised(lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")),
        raised(lambda: torch.ones(2, device="cuda:0") + torch.ones(2)),
        raised(lambda: torch.ones(2, device="cuda:9")),
        raised(lambda: torch.cuda.set_device(9)),
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
    made = torch.tensor([2], pin_memory=True), x.new_tensor([3], pin_memory=True)
    pins = [x.is_pinned(), y.is_pinned(), z.is_pinned(), *(tensor.is_pinned() for tensor in made)]
    return pins, y.tolist(), [tensor.item() for tensor in made], torch.ones(2, device="cuda").is_pinned()


@snippet
def graphs() -> Any:
    return (
        torch.cuda.is_current_stream_capturing(),
        raised(torch.cuda.CUDAGraph),
        raised(lambda: torch.cuda.make_graphed_callables(small_model(), (torch.randn(4, 16, device="cuda"),))),
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
        "alloc": raised(lambda: torch.cuda.caching_allocator_alloc(1024)),
        "blas": raised(torch.cuda.current_blas_handle),
        "memory history": raised(torch.cuda.memory._record_memory_history),
        "memory snapshot": raised(torch.cuda.memory_snapshot),
        "several GPUs": raised(
            lambda: torch.nn.DataParallel(torch.nn.Linear(2, 2).cuda(), [0, 1])(torch.ones(4, 2, device="cuda"))
        ),
        "runtime": raised(lambda: torch.cuda.cudart().cudaDeviceReset()),
    }


@snippet
def sensors() -> Any:
    return torch.cuda.temperature(), torch.cuda.power_draw("cuda"), torch.cuda.clock_rate(0), torch.cuda.memory_usage()


@snippet
def what_nvml_would_say() -> Any:
    """Half of the time busy is 50 %, waiting for nothing 0; memory is what torch has reserved and the context."""
    x = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    time.sleep(1.0)
    before = torch.cuda.utilization()
    begun = time.perf_counter()
    while time.perf_counter() - begun < 0.2:
        x @ x
        torch.cuda.synchronize()
    busy = torch.cuda.utilization("cuda:0")
    time.sleep(1 / 12)
    half = torch.cuda.utilization(0)
    free, total = torch.cuda.mem_get_info()
    used = torch.cuda.device_memory_used()
    return before == 0 and busy > 90 and 40 < half < 60 and used == total - free > torch.cuda.memory_reserved()


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
    elsewhere = raised(lambda: other.record(torch.cuda.Stream(device=0)))
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
    return raised(lambda: torch.randn(3, device="cuda", generator=torch.Generator()))


@snippet
def set_visible_devices() -> Any:
    """Before the first use only; here it is too late."""
    import os

    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    return torch.cuda.device_count()
