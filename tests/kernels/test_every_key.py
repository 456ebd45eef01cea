"""Every key of a GPU's data file changes what a run reports."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv2d, dropout, embedding, layer_norm, softmax
from torch.nn.functional import scaled_dot_product_attention as attention

from distsim.cluster.files.load import assemble, merged, preset_text
from distsim.cluster.files.spec import check_spec
from distsim.kernels import gpu as kernels_gpu
from distsim.kernels.gpu_file import GpuFile, read_gpu
from distsim.report import report_document
from distsim.sim import simulate
from distsim.text.file_tables import FileTable

NOTES = {"source"}
"""Keys for the reader of the file."""


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Any:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


def products() -> None:
    """In every data type; of every tile; that do not fill the device, are split, unaligned, grouped, convolutions."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        cuda(8192, 8192, dtype=dtype) @ cuda(8192, 8192, dtype=dtype)
    torch.backends.cuda.matmul.allow_tf32 = True
    cuda(8192, 8192, dtype=torch.float32) @ cuda(8192, 8192, dtype=torch.float32)
    scale = torch.ones((), device="cuda")
    eight, four = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
    torch._scaled_mm(cuda(4096, 4096, dtype=eight), cuda(4096, 4096, dtype=eight).t(), scale, scale)
    scales = torch.ones(4096 * 4096 // 32, device="cuda", dtype=torch.float8_e8m0fnu)
    torch._scaled_mm(cuda(4096, 2048, dtype=four), cuda(4096, 2048, dtype=four).t(), scales, scales)
    for rows, columns in ((148 * 256, 256), (148 * 256, 128), (148 * 128, 128), (148 * 128, 64), (148 * 64, 64)):
        cuda(rows, 16_384) @ cuda(16_384, columns)
    cuda(128, 8192) @ cuda(8192, 64)
    cuda(8192, 64) @ cuda(64, 8192)
    cuda(1025, 1027) @ cuda(1027, 1029)
    conv2d(cuda(8, 64, 64, 64), cuda(64, 64, 3, 3))
    torch._grouped_mm(cuda(4, 512, 512), cuda(4, 512, 512))


def attentions() -> None:
    """Short and long, of every width, with and without a mask, there and back, by every implementation."""
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        widths = (64, 128) if kernel is SDPBackend.CUDNN_ATTENTION else (64, 128, 256)
        with sdpa_kernel(kernel):
            for width in widths:
                one = cuda(1, 32, 4096, width, grad=True)
                attention(one, one, one, is_causal=width == 64).sum().backward()
    wide, narrow = cuda(1, 32, 4096, 192, grad=True), cuda(1, 32, 4096, 128, grad=True)
    attention(wide, wide, narrow).sum().backward()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        one = cuda(1, 8, 4096, 128, dtype=torch.float32)
        attention(one, one, one)


def memory() -> None:
    """Kernels of every class that moves bytes."""
    x, weight = cuda(4096, 8192, grad=True), cuda(8192, grad=True)
    x.detach().t().contiguous()
    dropout(x.detach().relu(), 0.1).sum()
    layer_norm(x, (8192,), weight).sum().backward()
    for rows, columns in ((65_536, 512), (8192, 4096), (64, 524_288)):
        softmax(cuda(rows, columns, dtype=torch.float32, grad=True), -1).sum().backward()
    table, words = cuda(4096, 1024, grad=True), torch.zeros(8192, dtype=torch.int64, device="cuda")
    optimizer = torch.optim.AdamW([table], fused=True)
    for _ in range(3):
        embedding(words, table).sum().backward()
        optimizer.step()


def host() -> None:
    """Copies of each kind, a few bytes, and launches that the host waits for."""
    there = torch.empty(1 << 26, dtype=torch.uint8).pin_memory()
    here = there.cuda(non_blocking=True)
    torch.cuda.synchronize()
    there.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    torch.empty(1 << 26, dtype=torch.uint8).cuda()
    float(cuda(8).sum())


def communication() -> None:
    """Beside kernels that lack what it takes."""
    one = cuda(4096, 4096)
    work = dist.all_reduce(cuda(1 << 27), async_op=True)
    _ = one @ one
    for _ in range(64):
        cuda(1 << 26).relu()
    assert work is not None
    work.wait()


def steps(dtype: torch.dtype) -> None:
    """Of a training whose products are of *dtype*: the interval around them has the range of its rate."""
    weight = torch.nn.Parameter(cuda(64, 64))
    weight.grad = cuda(64, 64)
    optimizer, scale = torch.optim.SGD([weight]), torch.ones((), device="cuda")
    for _ in range(3):
        one, other = cuda(4096, 4096, dtype=dtype), cuda(4096, 4096, dtype=dtype).t()
        _ = one @ other if dtype is torch.bfloat16 else torch._scaled_mm(one, other, scale, scale)
        optimizer.step()


PARTS = {
    "steps bf16": partial(steps, torch.bfloat16),
    "steps fp8": partial(steps, torch.float8_e4m3fn),
    "gemm": products,
    "attention": attentions,
    "memory": memory,
    "host": host,
    "comm": communication,
}
PART_OF = {"gemm.range.bf16": "steps bf16", "gemm.range.fp8": "steps fp8", "gemm.sources": "steps bf16"}
PART_OF |= {"gemm.persistent": "comm"}
PART_OF |= {f"{part}.{key}": "steps bf16" for part in ("attention", "memory") for key in ("range", "sources")}


def program(part: str) -> str:
    """Use the GPU for *part* (or for all), and return what torch says of it."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for use in [PARTS[part]] if part in PARTS else PARTS.values():
        use()
        torch.cuda.synchronize()
    return f"{torch.cuda.get_device_properties(0)} {torch.cuda.mem_get_info()}"


def keys(table: FileTable, path: str = "") -> Iterator[str]:
    """Every key of a file, and of its tables by data type and by tile every entry."""
    for name, value in vars(table).items():
        if isinstance(value, FileTable):
            yield from keys(value, f"{path}{name}.")
        elif isinstance(value, dict):
            yield from (f"{path}{name}.{entry}" for entry in value)
        else:
            yield f"{path}{name}"


def other(value: Any, factor: float) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "flash" if value == "cudnn" else f"{value}x"
    if isinstance(value, tuple):
        return tuple(each * factor for each in value)
    return type(value)(value * factor) if value else 0.01


def changed(table: Any, path: str, factor: float) -> Any:
    """*table* with another value of one key."""
    name, _, rest = path.partition(".")
    value = vars(table)[name] if isinstance(table, FileTable) else table[name]
    value = changed(value, rest, factor) if rest else other(value, factor)
    return table.replaced(**{name: value}) if isinstance(table, FileTable) else {**table, name: value}


def reported(spec: GpuFile, part: str, patch: pytest.MonkeyPatch) -> str:
    """What two of these GPUs make of the program: times, memory, cost, what the program read."""
    patch.setattr(kernels_gpu, "read_gpu", lambda name: spec)
    gpu = {"model": "mine.toml", "compute_capability": 100, "price": 2.0, "price_basis": ""}
    node = {"gpu": gpu, "cpu": {"model": "a CPU that nobody measured"}}
    cluster = assemble(check_spec(merged(tomllib.loads(preset_text("dgx-h100")), {"node": node}), "made"))
    outcome = simulate(program, cluster, [part], nproc_per_node=2)
    document = report_document(outcome)
    return str([outcome.results, *(value for key, value in document.items() if "wall" not in key)])


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    """Reports of the file as it is."""
    with pytest.MonkeyPatch.context() as patch:
        return {part: reported(read_gpu("b200"), part, patch) for part in (*PARTS, "all")}


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(set(keys(read_gpu("b200"))) - NOTES))
def test_every_key_changes_a_report(key: str, before: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times, its memory, its cost, or what torch says of the GPU; a tile as quick as others does when quicker."""
    part = PART_OF.get(key, key.partition(".")[0])
    part = part if part in PARTS else "all"
    files = (changed(read_gpu("b200"), key, factor) for factor in (0.7, 1.2))
    assert any(reported(file, part, monkeypatch) != before[part] for file in files), f"{key} changes nothing"
