"""Replacements of libraries that only a GPU machine has, and which of them a program gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import distsim
from distsim.errors import NotSimulated, UsageError
from distsim.libraries.catalog import LIBRARIES


@pytest.fixture(autouse=True)
def _absent() -> Iterator[None]:
    """No library of a stand-in is left over from another test."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]:
        del sys.modules[name]


def simulated(fn: Any, **how: Any) -> Any:
    return distsim.simulate(fn, on="dgx-h100:1", nproc_per_node=1, **how)


def q(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def gpu_ms(call: Any) -> float:
    """Return the milliseconds that the GPU takes for what *call* launches."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10_000_000)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def test_attention_has_torchs_shapes_and_price() -> None:
    """flash_attn's functions give torch's results in their own layout, forward and backward, at FlashAttention-2's
    price; sequences in one row are priced as sequences of one length."""

    def body() -> Any:
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from xformers.ops import LowerTriangularMask, memory_efficient_attention

        x, row = q(4, 1024, 8, 64), q(4096, 8, 64)
        starts = torch.arange(0, 4097, 1024, dtype=torch.int32, device="cuda")
        flash_attn_func(x, x, x, causal=True).sum().backward()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torchs = x.transpose(1, 2)
            own = gpu_ms(lambda: torch.nn.functional.scaled_dot_product_attention(torchs, torchs, torchs))
        return (
            gpu_ms(lambda: flash_attn_func(x, x, x)) / own,
            gpu_ms(lambda: flash_attn_varlen_func(row, row, row, starts, starts, 1024, 1024)) / own,
            tuple(flash_attn_varlen_func(row[:4000], row[:4000], row[:4000], starts, starts, 1500, 1500).shape),
            tuple(memory_efficient_attention(x, x, x, attn_bias=LowerTriangularMask()).shape),
        )

    outcome = simulated(body)
    plain, varlen, *shapes = outcome.results[0]
    assert plain == pytest.approx(1.0)
    assert varlen == pytest.approx(1.0)
    assert shapes == [(4000, 8, 64), (4, 1024, 8, 64)]
    assert any("flash_attn is not installed: a replacement" in note for note in outcome.notes)


def test_rotary_embedding_norms_and_optimizer_run_a_step() -> None:
    """What picotron and nanotron take of flash_attn, and apex's norm and optimizer."""

    def body() -> Any:
        from apex.normalization import FusedLayerNorm
        from apex.optimizers import FusedAdam
        from flash_attn.layers.rotary import apply_rotary_emb
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        model = FusedLayerNorm(64).to("cuda", torch.bfloat16)
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        cos = torch.ones(128, 16, device="cuda", dtype=torch.bfloat16)
        turned = apply_rotary_emb(q(2, 128, 8, 64), cos, cos, interleaved=True)
        normed, total = layer_norm_fn(turned, q(64), None, residual=turned, prenorm=True, is_rms_norm=True)
        out = model(normed + total)
        out.sum().backward()
        optimizer.step()
        return tuple(out.shape), optimizer.state_dict()["state"][0]["exp_avg"].dtype

    assert simulated(body).results == [((2, 128, 8, 64), torch.float32)]


def test_packed_rotary_embedding_works_in_place() -> None:
    """flash_attn rotates packed keys where they are."""

    def body() -> Any:
        from flash_attn.layers.rotary import apply_rotary_emb_kv_

        cos = torch.ones(128, 32, device="cuda", dtype=torch.bfloat16)
        packed = q(2, 128, 2, 8, 64) * 1
        before = torch.cuda.memory_allocated()
        kv = apply_rotary_emb_kv_(packed, cos, cos)
        return kv.data_ptr() == packed.data_ptr(), torch.cuda.memory_allocated() - before

    assert simulated(body).results == [(True, 0)]


def test_sequences_of_one_length_are_not_copied() -> None:
    """The backward pass of flash_attn_varlen_func launches no copy of queries, keys and values."""

    def body() -> None:
        from flash_attn import flash_attn_varlen_func

        row = q(4096, 8, 64)
        starts = torch.arange(0, 4097, 1024, dtype=torch.int32, device="cuda")
        optimizer = torch.optim.SGD([row], lr=0.1)
        for _ in range(2):
            flash_attn_varlen_func(row, row, row, starts, starts, 1024, 1024, causal=True).sum().backward()
            optimizer.step()

    training = simulated(body).training
    assert "slice_backward" not in {operator.name for operator in training.operators}


def test_apex_trains() -> None:
    """Its mixed precision, DDP, batch norm over ranks and LARC run a step; what O2 does is refused by name."""

    def body() -> Any:
        import apex
        from apex.parallel.LARC import LARC

        torch.distributed.init_process_group("nccl")
        group = apex.parallel.create_syncbn_process_group(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).cuda()
        model = apex.parallel.convert_syncbn_model(model, process_group=group)
        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), trust_coefficient=0.001)
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O1")
        model = apex.parallel.DistributedDataParallel(model)
        out = model(torch.ones(256, 64, device="cuda"))
        with apex.amp.scale_loss(out.float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        with pytest.raises(NotSimulated, match="opt_level='O2'"):
            apex.amp.initialize(model, optimizer, opt_level="O2")
        return optimizer.param_groups[0]["weight_decay"]

    outcome = simulated(body)
    assert outcome.results == [0.1]
    assert outcome.training is not None
    assert outcome.training.steps == 1


def test_a_program_that_can_do_without_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import whose ImportError is caught, here or by who imports the module, finds nothing."""
    (tmp_path / "uses_flash.py").write_text("import flash_attn\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def body() -> Any:
        import contextlib

        found = []
        try:
            import flash_attn  # noqa: F401

            found.append("flash_attn")
        except ImportError:
            pass
        with contextlib.suppress(ModuleNotFoundError):
            import uses_flash  # noqa: F401

            found.append("uses_flash")
        return found

    assert simulated(body).results == [[]]


def install(folder: Path, **files: str) -> None:
    """Write modules of packages into *folder*; a double underscore in a name stands for a dot."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)


def test_an_installed_library_that_needs_a_gpu_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiled kernels cannot run on simulated tensors; a folder of the program with such a name is its own."""
    install(tmp_path / "site-packages", apex__optimizers="from _cuda_kernels import step\n")
    install(tmp_path / "repository", deep_ep__own="own = 1\n")
    for folder in ("site-packages", "repository"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))

    def body() -> Any:
        try:
            import apex.optimizers
        except ImportError:
            return None
        import deep_ep.own

        return apex.optimizers.FusedAdam.__name__, deep_ep.own.own

    outcome = simulated(body)
    assert outcome.results == [("FusedAdam", 1)]
    assert any("the kernels of apex need a GPU: a replacement" in note for note in outcome.notes)


ATTENTION = """
import torch
import flash_attn_2_cuda as kernels

class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        options = (0.0, q.shape[-1] ** -0.5, causal, -1, -1, 0.0)
        out, sums, _, state = kernels.fwd(q, k, v, None, None, *options, False, None)
        ctx.save_for_backward(q, k, v, out, sums, state)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, sums, state = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (q, k, v)]
        kernels.bwd(grad, q, k, v, out, sums, *grads, None, *ctx.options, False, None, state)
        return (*grads, None)

def own(q, k, v, starts=None, longest=0):
    if starts is None:
        return Attention.apply(q, k, v, True)
    rest = (None, None, None, None, longest, longest, 0.0, 1.0, False, True, -1, -1, 0.0, False, None)
    return kernels.varlen_fwd(q, k, v, None, starts, starts, *rest)[0]
"""


def test_an_installed_library_runs_its_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below it the compiled kernels have the price of torch's, forward, backward and of packed sequences, also of ones
    whose longest is unknown; what it lacks raises ImportError."""
    install(tmp_path / "site-packages", flash_attn__interface=ATTENTION)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    def body() -> Any:
        from flash_attn.interface import own
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with pytest.raises(ImportError):
            import flash_attn.layers  # noqa: F401
        x, row = q(4, 1024, 8, 64), q(4096, 8, 64).detach()
        starts = torch.arange(0, 4097, 1024, dtype=torch.int32, device="cuda")
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torchs = q(4, 8, 1024, 64)
            plain = torch.nn.functional.scaled_dot_product_attention(torchs, torchs, torchs, is_causal=True)
            twin = own(x, x, x)
            calls = (
                lambda: own(x, x, x),
                lambda: own(row, row, row, starts, 1024),
                lambda: own(row, row, row, starts, 0),
                lambda: torch.nn.functional.scaled_dot_product_attention(torchs, torchs, torchs, is_causal=True),
            )
            *ours, reference = map(gpu_ms, calls)
        grad = torch.ones_like(plain), torch.ones_like(twin)
        backward = [gpu_ms(lambda out=out, g=g: out.backward(g)) for out, g in zip((plain, twin), grad, strict=True)]
        return [each / reference for each in ours], backward[1] / backward[0]

    outcome = simulated(body)
    forward, backward = outcome.results[0]
    assert forward == pytest.approx([1.0] * 3, rel=1e-3)
    assert backward == pytest.approx(1.0, rel=0.05)
    assert any("the kernels of flash_attn_2_cuda need a GPU: a replacement" in note for note in outcome.notes)


def test_compiled_attention_has_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --data real flash_attn's own Python computes what torch computes, and its gradients."""
    install(tmp_path / "site-packages", flash_attn__interface=ATTENTION)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    def body() -> Any:
        from flash_attn.interface import own

        ours = [torch.randn(2, 4, 2, 8, device="cuda", requires_grad=True) for _ in range(3)]
        theirs = [t.detach().cpu().transpose(1, 2).requires_grad_() for t in ours]
        out = own(*ours)
        plain = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True)
        out.square().sum().backward()
        plain.square().sum().backward()
        pairs = [(out, plain), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
        return [torch.allclose(a.cpu(), b.transpose(1, 2), atol=1e-4) for a, b in pairs if a is not None]

    assert simulated(body, data="real").results == [[True] * 4]


KERNELS = """
import triton

@triton.jit
def _rms_norm_backward_kernel(grad, x, out): ...

@triton.jit
def _triton_rope(q): ...

@triton.jit
def _new_kernel(x): ...
"""


def test_kernels_of_libraries_have_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known Triton kernel has a price of its own and no note, and --strict-kernels accepts it; another one, and one
    of the program with that name, are priced by their bytes."""
    for place in ("site-packages/liger_kernel/ops.py", "repository/own_kernels.py"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(KERNELS)
        monkeypatch.syspath_prepend(str(tmp_path / place.partition("/")[0]))
    (tmp_path / "site-packages" / "liger_kernel" / "__init__.py").touch()

    def body() -> Any:
        import own_kernels  # type: ignore[import-not-found]
        from liger_kernel import ops

        x = q(65536, 4096).detach()

        def both(name: str, *args: Any) -> float:
            own, known = (getattr(module, name)[(1,)] for module in (own_kernels, ops))
            return gpu_ms(lambda: known(*args)) / gpu_ms(lambda: own(*args))

        return both("_triton_rope", x), both("_rms_norm_backward_kernel", x, x, x), both("_new_kernel", x)

    outcome = simulated(body)
    rope, norm, new = outcome.results[0]
    assert rope == pytest.approx(2.0, rel=0.05)
    assert norm > 1.5
    assert new == pytest.approx(1.0)

    def strict() -> Any:
        from liger_kernel import ops

        ops._triton_rope[(1,)](q(64))
        with pytest.raises(NotSimulated, match="_new_kernel with --strict-kernels"):
            ops._new_kernel[(1,)](q(64))
        return True

    only_known = simulated(strict, strict_kernels=True)
    assert only_known.results == [True]
    assert not any("_triton_rope" in note for note in only_known.notes)


def test_deepspeeds_extensions_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its builders find their extensions loaded: Adam for tensors of a GPU, and on the host torch's own."""
    (tmp_path / "op_builder").mkdir()
    (tmp_path / "op_builder" / "__init__.py").touch()
    (tmp_path / "op_builder" / "builder.py").write_text("class OpBuilder:\n    _loaded_ops = {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def body() -> Any:
        from op_builder.builder import OpBuilder

        weight, grad, moment, other = (torch.ones(1024, device="cuda") for _ in range(4))
        before = torch.cuda.memory_allocated()
        lists = [[grad], [weight], [moment], [other]]
        OpBuilder._loaded_ops["fused_adam"].multi_tensor_adam(65536, None, lists, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
        host = [torch.ones(8) for _ in range(2)] + [torch.zeros(8) for _ in range(2)]
        OpBuilder._loaded_ops["cpu_adam"].adam_update(0, 1, 0.1, 0.9, 0.999, 1e-8, 0.0, True, *host)
        return torch.cuda.memory_allocated() - before, host[0][0].item()

    assert simulated(body).results == [(0, pytest.approx(0.9))]


def test_what_a_stand_in_has_not_got_is_refused_by_name() -> None:
    """A name can be imported and passed round; its call says what it is, and what to do."""

    def body() -> Any:
        import transformer_engine.pytorch as te
        from apex import something_new
        from fbgemm_gpu.nn import SomeLayer

        class Own(te.SomethingNew):
            pass

        assert not isinstance(1, SomeLayer)
        names = []
        for call in (something_new, Own):
            with pytest.raises(distsim.NotSimulated, match=r"set its cost with distsim\.kernel_cost") as error:
                call(1, 2)
            names.append(str(error.value).partition(" ")[0])
        return names

    assert simulated(body).results == [["apex.something_new", "transformer_engine.pytorch.SomethingNew"]]


def test_a_function_without_replacement_names_the_command_that_installs_it() -> None:
    """A library's own Python runs where it is installed, so that the refusal of a function says how to install it."""

    def body() -> Any:
        import mamba_ssm
        from flash_attn.bert_padding import unpad_input

        commands = []
        for call in (unpad_input, mamba_ssm.Mamba2):
            with pytest.raises(NotSimulated) as error:
                call(1, 2)
            commands.append(str(error.value).partition("SKIP_CUDA_BUILD=TRUE ")[2])
        return commands

    outcome = simulated(body)
    pip = "pip install --no-build-isolation --no-deps"
    assert outcome.results == [[f"{pip} flash-attn", f"{pip} mamba-ssm"]]
    assert any("mamba_ssm is not installed: its functions are refused" in note for note in outcome.notes)


def test_the_documentation_has_the_commands() -> None:
    """docs/limits.md lists how each library is installed."""
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    commands = {name: library.install for name, library in LIBRARIES.items() if library.install}
    assert [name for name, command in commands.items() if f"| {name} | `{command}` |" not in page] == []


def test_values_are_computed_or_refused() -> None:
    """With --data real attention has its values; what the stand-in takes for granted is refused."""

    def body() -> Any:
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        x = torch.arange(2 * 4 * 2 * 8, device="cuda", dtype=torch.bfloat16).view(2, 4, 2, 8) / 64
        out = flash_attn_func(x, x, x, causal=True)
        by_torch = torch.nn.functional.scaled_dot_product_attention(*[x.transpose(1, 2).cpu()] * 3, is_causal=True)
        row, starts = x.view(8, 2, 8), torch.tensor([0, 3, 8], dtype=torch.int32, device="cuda")
        with pytest.raises(distsim.NotSimulated, match="flash_attn_varlen_func with --data real"):
            flash_attn_varlen_func(row, row, row, starts, starts, 5, 5)
        return torch.allclose(out.cpu(), by_torch.transpose(1, 2), atol=0.02)

    assert simulated(body, data="real").results == [True]


def test_xformers_operators_have_names() -> None:
    """A list of what is not recomputed names its kernels as operators of torch (lingua), in a second simulation too."""

    def body() -> str:
        import xformers.ops  # noqa: F401

        return str(torch.ops.xformers_flash.flash_fwd.default)

    for _ in range(2):
        assert (
            distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2).results
            == ["xformers_flash.flash_fwd.default"] * 2
        )


def test_a_handler_that_only_raises_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`except ImportError: raise RuntimeError("please install it")` does without nothing (nanotron)."""
    text = "try:\n    import {0}\nexcept ImportError:\n    {1}\n"
    (tmp_path / "asks.py").write_text(text.format("grouped_gemm", "raise RuntimeError('please install it')"))
    (tmp_path / "does_without.py").write_text(text.format("megablocks", "megablocks = None"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def body() -> Any:
        import asks  # type: ignore[import-not-found]
        import does_without  # type: ignore[import-not-found]

        return asks.grouped_gemm.__name__, does_without.megablocks

    assert simulated(body).results == [("grouped_gemm", None)]


def imported() -> tuple[bool, bool]:
    """Return whether a guarded import of flash_attn and one of transformer_engine succeed."""
    try:
        import flash_attn  # noqa: F401

        has_attention = True
    except ImportError:
        has_attention = False
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return has_attention, False
    return has_attention, True


@pytest.mark.parametrize(
    ("libraries", "expected"),
    [(None, (False, False)), ("flash-attn", (True, False)), ("transformer_engine,flash_attn", (True, True))],
)
def test_the_simulated_machine_has_the_libraries_that_are_named(
    libraries: str | None, expected: tuple[bool, bool]
) -> None:
    """A program that does without a library gets its stand-in only where it was asked for."""
    assert simulated(imported, gpu_libraries=libraries).results == [expected]


def test_apex_stands_for_its_extensions() -> None:
    """As its wheel installs them: Megatron catches their ImportErrors one by one."""

    def body() -> bool:
        try:
            import fused_weight_gradient_mlp_cuda  # noqa: F401
        except ImportError:
            return False
        return True

    found = [simulated(body, gpu_libraries=names).results for names in ("apex", "flash_attn")]
    assert found == [[True], [False]]


def test_a_machine_without_gpu_libraries_and_an_unknown_one() -> None:
    """`none` makes an import fail that nothing catches, and a wrong name is one line."""

    def unguarded() -> None:
        import flash_attn  # noqa: F401

    (failure,) = simulated(unguarded, gpu_libraries="none", check=False).failures
    assert failure.type == "ModuleNotFoundError"
    with pytest.raises(UsageError, match="--gpu-libraries flash: expected none, or some of flash_attn, "):
        simulated(unguarded, gpu_libraries="flash")


def test_xformers_masks_of_sequences_in_one_row() -> None:
    """Each attends to itself; the row is split as its tensors were joined (dinov2's nested tensors)."""

    def body() -> Any:
        from xformers.ops import fmha, index_select_cat, memory_efficient_attention, scaled_index_add

        crops = [torch.randn(2, 5, 4, 16, device="cuda"), torch.randn(3, 7, 4, 16, device="cuda")]
        mask, row = fmha.BlockDiagonalMask.from_tensor_list(crops)
        parts = mask.split(memory_efficient_attention(row, row, row, attn_bias=mask))
        alone = [F.scaled_dot_product_attention(*[crop.transpose(1, 2)] * 3).transpose(1, 2) for crop in crops]
        rows, index = torch.ones(3, 8, device="cuda"), torch.tensor([0, 2], device="cuda")
        kept = index_select_cat([rows, rows], [index, index[:1]]).shape
        added = scaled_index_add(rows, index, rows[:2], scaling=rows[0] * 2)
        close = all(torch.allclose(one, other, atol=1e-5) for one, other in zip(parts, alone, strict=True))
        return close, tuple(kept), added[:, 0].tolist()

    assert simulated(body, data="real").results == [(True, (24,), [3.0, 1.0, 3.0])]


def test_a_failure_without_a_library_names_the_flag() -> None:
    """A program that catches the ImportError and stops later, as dinov2 does."""

    def requires() -> None:
        if not any(imported()):
            raise AssertionError("Flash_attn is required")

    notes = simulated(requires, check=False).notes
    assert any("--gpu-libraries flash_attn gives the simulated machine" in note for note in notes)
    assert not any("transformer_engine" in note for note in notes)


def test_extensions_of_flash_attns_repository() -> None:
    """rotary_emb, xentropy_cuda_lib and dropout_layer_norm have the shapes of the compiled ones; rows of a subset are
    refused."""

    def body() -> Any:
        import dropout_layer_norm
        import rotary_emb
        import xentropy_cuda_lib

        x, weight = q(64, 128).detach(), q(128).detach()
        rotary_emb.apply_rotary(x, x, x, x, x, x, False)
        labels = torch.zeros(64, dtype=torch.long, device="cuda")
        losses, sums = xentropy_cuda_lib.forward(x, labels, 0.0)
        grad = xentropy_cuda_lib.backward(losses, x, sums, labels, 0.0, True, 128)
        rest = (weight, None, None, None, None, None)
        plain = dropout_layer_norm.dropout_add_ln_fwd(x, None, *rest, 0.0, 1e-5, 1.0, 0, None, False, True)
        wide = dropout_layer_norm.dropout_add_ln_fwd(x, None, *rest, 0.1, 1e-5, 1.0, 0, None, True, True)
        of_norm = dropout_layer_norm.dropout_add_ln_bwd(
            x, None, wide[1], None, wide[2], wide[3], wide[4], weight, None, None, None, None, 0.1, 1.0, 0, True, True
        )
        with pytest.raises(distsim.NotSimulated, match="subset of rows"):
            dropout_layer_norm.dropout_add_ln_fwd(x, None, weight, None, None, None, labels, None, 0.0, 1e-5, 1.0, 0)
        shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in (*plain[:3], *wide[:4], *of_norm)]
        return losses.dtype, grad is x, shapes

    dtype, is_in_place, shapes = simulated(body).results[0]
    bf16, rows = ((64, 128), torch.bfloat16), ((64,), torch.float32)
    wide = ((64, 128), torch.float32)
    weights = ((128,), torch.bfloat16)
    assert (dtype, is_in_place) == (torch.float32, True)
    assert shapes == [
        bf16,
        None,
        None,
        bf16,
        wide,
        ((64, 128), torch.uint8),
        rows,
        bf16,
        wide,
        weights,
        weights,
        None,
        None,
    ]
