"""Small CUDA programs do in a rank what they do on a GPU, as far as anybody can tell without its numbers."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from device import runtime_snippets, training_snippets
from device.collected import SNIPPETS

import distsim

OTHER_DEVICE = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and {}!"
ORDINAL = "CUDA error: invalid device ordinal"
REFUSED = "is not simulated"
H100 = "NVIDIA H100 80GB HBM3"

EXPECTED: dict[str, Any] = {
    "begins": [False, True, False, True, 4],
    "backward": ("cuda:0", (8, 16), True, "torch.cuda.FloatTensor"),
    "values": (15, [[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5]], True, 5),
    "numpy_is_refused": (
        "TypeError",
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.",
    ),
    "printing": (
        "tensor([1., 2.], device='cuda:0')",
        "tensor(<16777216 unknown values>, size=(4096, 4096), device='cuda:0')",
        "1.0",
    ),
    "masked_assignment": ([False, True], [[6.0, 6.0, 6.0], [4.0, 0.0, 4.0]]),
    "set_default_device": ("cuda:0", "cuda:0", "cuda:1"),
    "meta_then_to_empty": ("cuda:0", 0.0),
    "training_step": [True] * 5,
    "autocast": ("torch.bfloat16", "torch.float32", "torch.float16", "torch.float16"),
    "grad_scaler": (131072.0, 32768.0, 65536.0),
    "grad_scaler_training": 131072.0,
    "attention": [
        ("ScaledDotProductCudnnAttentionBackward0", (2, 4, 128, 64), (2, 4, 128, 64)),
        ("ScaledDotProductEfficientAttentionBackward0", (2, 4, 128, 64), (2, 4, 128, 64)),
        ("ScaledDotProductEfficientAttentionBackward0", (2, 4, 128, 64), (2, 4, 128, 64)),
        ("ToCopyBackward0", (2, 4, 128, 64), (2, 4, 128, 64)),
        ("ScaledDotProductEfficientAttentionBackward0", (2, 4, 128, 64), (2, 4, 128, 64)),
    ],
    "grouped_attention": (2, 8, 64, 64),
    "latent_attention": ("ScaledDotProductCudnnAttentionBackward0", (2, 4, 128, 128)),
    "rms_norm": ("FusedRmsNormBackward0", (64 << 10) + (4 << 10) + 512, (16, 1 << 10)),
    "encoder_layer": (2, 16, 64),
    "convolution": (2, 8),
    "recurrent": ((2, 5, 16), (2, 2, 16), (2, 2, 16)),
    "embedding_and_loss": (True, True),
    "checkpointing": [True, True],
    "loader": [True, 6.0, "cuda:0", True, 22.0, "cuda:0"],
    "streams": (True, False, True, True, True),
    "generic_streams": (True, True, True, True),
    "backward_follows_forward": ([True], True),
    "backward_joins_its_streams": (True, True),
    "event_errors": (
        [
            ("ValueError", "Both events must be created with argument 'enable_timing=True'."),
            ("ValueError", "Both events must be recorded before calculating elapsed time."),
            ("RuntimeError", "Both events must be completed before calculating elapsed time."),
            ("NotSimulated", f"Event.ipc_handle {REFUSED}: ranks share no GPU memory: synchronize by collectives"),
            ("NotSimulated", f"torch.cuda.ExternalStream {REFUSED}: use torch.cuda.Stream()"),
        ],
        True,
    ),
    "memory": {
        "held": 3 << 20, "small": 512, "left": 0, "peak": (3 << 20) + 512, "reserved": 22 << 20, "kept": 22 << 20,
        "after": 0, "stats": True, "summary": True, "free": True, "accelerator": True,
    },
    "out_of_memory": (
        "OutOfMemoryError", "CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 0 has", "OutOfMemoryError", 2,
    ),
    "seeds": {
        "again": True, "seed": 7, "generator": True, "all": True, "device": "cuda:0", "is": True, "state": 16,
        "states": 8,
    },
    "properties": (H100, H100, (9, 0), True, 132, True, "12.8", True, True, True, 2),
    "flags": (True, True, "high", True, True),
    "accelerator": ("cuda", 8, True, 1, 1, 0),
    "devices": [1, 1, 0, 2, True, 0, 0],
    "save_and_load": [(where, 130816.0, (512, 512)) for where in ("cuda:0", "cpu", "cuda:0", "cuda:1", "cuda:0")],
    "storages": [32, 32, "cuda:0", 32, 32, 0, 8, True, True, 0, 4096, 0, 0, 8],
    "pinned": ([False, True, True, True, True], [1.0, 1.0, 1.0, 1.0], [2, 3.0], False),
    "masks": ([3.0, 4.0, 5.0], 10.0, True, [2, 3, 4]),
    "vmapped": ([3.0, 12.0], [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]),
    "graphs": (False, ("", ""), ("", "")),
    "ranges": True,
    "deep_copies": ("cuda:0", [0.0, 1.0, 2.0], [1.0, 2.0, 3.0], True, [0.0, 0.0]),
    "moves": ("torch.bfloat16", "cpu", [1.0, 1.0, 1.0], "torch.cuda.HalfTensor"),
    "quiet": [],
    "arguments_in_place": ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]),
    "sensors": (0, 0, 0, 0),
    "what_nvml_would_say": True,
    "elapsed_is_the_cost": (True, True),
    "an_event_is_recorded_again": (
        True, False, True, "cuda:0",
        ("RuntimeError", "Event device 1 does not match recording stream's device 0."),
    ),
    "many_streams": (32, True, -3, (0, -3)),
    "record_stream_keeps_memory": (True, 64 << 20, True),
    "growing_a_storage": (1 << 20, (1 << 18,), (8,)),
    "a_generator_of_the_host": ("RuntimeError", "Expected a 'cuda' device type for generator but found 'cpu'"),
    "lstm_and_other_modules": [(2, 8, 16)] * 6,
    "set_visible_devices": 8,
}  # fmt: skip


assert runtime_snippets.__name__ < training_snippets.__name__  # the first of all asks whether CUDA has begun


def run_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, call in SNIPPETS.items():
        try:
            found[name] = call()
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What all of them returned, in one simulated process."""
    outcome = distsim.simulate(run_all, on="dgx-h100:1", nproc_per_node=1)
    assert outcome.exit_code == 0
    result: dict[str, Any] = outcome.results[0]
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPECTED)
def test_a_snippet(found: dict[str, Any], name: str) -> None:
    """What the program sees is what a GPU of that kind shows."""
    assert found[name] == EXPECTED[name]


def test_devices_do_not_mix(found: dict[str, Any]) -> None:
    """Tensors of two devices, and a device that is not there, give torch's own errors."""
    gpus, host, absent, chosen, number = found["crossing_devices"]
    assert gpus == ("RuntimeError", OTHER_DEVICE.format("cuda:1"))
    assert host == ("RuntimeError", OTHER_DEVICE.format("cpu"))
    for kind, text in (absent, chosen):
        assert kind == "AcceleratorError"
        assert text.startswith(ORDINAL)
    assert number == "cuda:0"


def test_refusals_name_what_to_do(found: dict[str, Any]) -> None:
    """What needs a real GPU is refused by the name that the program used."""
    for kind, text in found["refusals"].values():
        assert kind == "NotSimulated"
        assert text.startswith(("torch.", "cudart()"))
        assert ": " in text


def test_every_snippet_is_looked_at() -> None:
    """None is run for nothing."""
    assert set(SNIPPETS) - set(EXPECTED) == {"crossing_devices", "refusals"}


@pytest.mark.slow
def test_compiled_code_runs_as_it_is() -> None:
    """A compiled module has torch.compile's names, a function stays as it is; the report says that nothing is fused."""

    def body() -> Any:
        model = torch.compile(torch.nn.Linear(16, 4).cuda())

        @torch.compile(mode="max-autotune")
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        out = model(torch.randn(4, 16, device="cuda"))
        return tuple(out.shape), twice(torch.ones(2, device="cuda")).tolist(), sorted(model.state_dict())

    outcome = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1)
    assert outcome.results[0] == ((4, 4), [2.0, 2.0], ["_orig_mod.bias", "_orig_mod.weight"])
    assert [note for note in outcome.notes if note.startswith("torch.compile")]


@pytest.mark.slow
def test_torch_tensor_follows_a_default_device_that_is_the_first_of_the_process(tmp_path: Path) -> None:
    """torch decides once in a process which functions a default device applies to: a new process is needed."""
    script = tmp_path / "train.py"
    script.write_text('import torch; torch.set_default_device("cuda"); print("on", torch.tensor([1.0]).device)\n')
    done = subprocess.run(
        [sys.executable, "-m", "distsim", "run", "--on", "dgx-h100:1", "--nproc-per-node", "1", str(script)],
        capture_output=True,
        text=True,
    )
    assert "on cuda:0" in done.stdout, done.stderr
