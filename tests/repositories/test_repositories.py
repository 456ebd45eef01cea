"""Public training repositories run on simulated GPUs by the commands of their READMEs (repositories.toml).

DISTSIM_REPOSITORIES names a folder that holds checkouts as OWNER/NAME; what is not there, or needs a package that is
not installed, is skipped. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 280
PROGRAMS = tomllib.loads((Path(__file__).parent / "repositories.toml").read_text())["program"]

IMAGES = """
import os, sys
from PIL import Image
for part in ("train", "val"):
    for label in range(4):
        os.makedirs(f"images/{part}/n{label}")
        for i in range(int(sys.argv[1]) // 4 if part == "train" else 16):
            Image.new("RGB", (64, 64), (i % 256, label, i % 256)).save(f"images/{part}/n{label}/{i}.jpeg")
"""

TOKENIZER = """
import json, os, sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
letters = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
os.makedirs(sys.argv[1], exist_ok=True)
tokenizer.save(f"{sys.argv[1]}/tokenizer.json")
config = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), letters[0])
config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}", "add_bos_token": False}
json.dump(config, open(f"{sys.argv[1]}/tokenizer_config.json", "w"))
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * LIMIT_S)]


def _is_installed(package: str) -> bool:
    """Return whether *package*, a module (`timm`) or a release of a distribution (`timm==0.3.2`), can be imported."""
    name, _, version = package.partition("==")
    if version:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name) == version
        return False
    return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program["name"])
def test_start_command_reaches_a_report(program: dict[str, Any], tmp_path: Path) -> None:
    """The simulated job finishes (5: --budget left ranks untraced), and its report has a step time."""
    checkout = Path(os.environ.get("DISTSIM_REPOSITORIES", "repositories-are-not-here")) / program["repository"]
    if not checkout.is_dir():
        pytest.skip(f"no checkout of {program['repository']} under $DISTSIM_REPOSITORIES")
    for package in program.get("needs", ()):
        if not _is_installed(package):
            pytest.skip(f"{package} is not installed")
    # the programs write checkpoints and logs where they start
    shutil.copytree(checkout, tmp_path / "checkout", ignore=shutil.ignore_patterns(".git"))
    folder = tmp_path / "checkout" / program.get("folder", ".")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "DISTSIM"))}
    environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false"}
    if "images" in program:
        subprocess.run([sys.executable, "-c", IMAGES, str(program["images"])], cwd=folder, env=environ, check=True)
    if "tokenizer" in program:
        subprocess.run([sys.executable, "-c", TOKENIZER, program["tokenizer"]], cwd=folder, env=environ, check=True)
    subprocess.run([sys.executable, "-c", program.get("data", "")], cwd=folder, env=environ, check=True)
    words = shlex.split(program["command"])
    way = "shell" if words[0] in ("bash", "env") else "run"
    command = [sys.executable, "-m", "distsim", way, *program.get("flags", "").split(), "--on", "dgx-h100:1", "--"]
    done = subprocess.run(
        [*command, *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    output = done.stdout + done.stderr
    assert done.returncode in (0, 5), output
    assert re.search(program.get("expect", r"^step +[0-9]"), output, re.MULTILINE), output
    assert not re.search(r"^(WARNING|HANG|ERROR)  NaN", output, re.MULTILINE), output
