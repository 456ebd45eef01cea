"""`distsim scenario new`: a first scenario, with a program that hangs and the diagnosis it expects, and the schema that
editors read beside it."""

from __future__ import annotations

from pathlib import Path

from distsim.errors import UsageError
from distsim.scenario.file.load import lacks
from distsim.scenario.file.schema import ID, json_schema
from distsim.text.untrusted_input import brief, read_text

SCHEMA = "scenario.schema.json"
"""File name of the schema: a local file, because editors find it offline and it comes with a checkout."""

SCENARIO = f"""\
#:schema ./{SCHEMA}
schema = "distsim.scenario/1"
teaches = "What this scenario shows, in one sentence."
program = "{{stem}}.py"              # beside this file; or "file.py:function", "package.module:function"
on = "ethernet-cpu:2"              # distsim topo list shows others
nproc_per_node = 2

# [[faults]]                       # what goes wrong, where, when, for how long: distsim scenario schema
# what = "freeze"
# ranks = [1]
# call = "all_reduce #2"

[expect]
kind = "missing_rank"              # "healthy" once the program is right
culprits = [0]
line = "# <- culprit"              # a line of the program that ends like this
"""

PROGRAM = '''\
"""What this scenario shows, in one sentence."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(4)
dist.all_reduce(t)
if rank != 0:  # the mistake: a collective that rank 0 never reaches
    dist.all_reduce(t)
dist.barrier()  # <- culprit
dist.destroy_process_group()
'''


def new_scenario(path: Path, program: str | None = None) -> list[Path]:
    """Write a scenario to *path*, a program beside it unless *program* names one, and the schema unless an equal one
    exists.

    Return the files that were written.
    """
    if path.suffix != ".toml":
        path = path.with_suffix(".toml")
    if program is not None:
        _check(program, path.parent)
    script = path.with_suffix(".py")
    for one in [path, *([] if program else [script])]:
        if one.exists():
            raise UsageError(f"{one} exists already; choose another name")
    written = {path: SCENARIO.format(stem=path.stem), script: PROGRAM}
    if program is not None:
        text = written[path].replace(f'"{path.stem}.py"', f'"{program}"').split("[expect]")[0]
        written = {path: f'{text}[expect]\nkind = "healthy"\n'}
    schema = path.with_name(SCHEMA)
    written[schema] = json_schema() + "\n"
    try:
        if schema.exists():
            there = read_text(schema)
            if ID not in there:
                raise UsageError(f"{schema} exists already and is not ours; choose another folder")
            if there == written[schema]:
                del written[schema]
        path.parent.mkdir(parents=True, exist_ok=True)
        for one, text in written.items():
            one.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}: {error.filename})") from None
    return list(written)


def _check(program: str, folder: Path) -> None:
    """Refuse what could not be run: a script is found from the new file on, a module has a function."""
    head, colon, tail = program.rpartition(":")
    named, function = (head, tail) if colon and head and tail.isidentifier() else (program, None)
    if named.endswith(".py"):
        if not (folder / named).is_file():
            raise UsageError(
                f"--program {brief(program)}: expected a script that exists, found no file {folder / named}: write it "
                "first, give its path as seen from the new file, or leave --program out to get one"
            )
        if function is not None and lacks(folder / named, function):
            raise UsageError(f"--program {brief(program)}: no function {function} in {folder / named}; name one it has")
    elif function is None:
        raise UsageError(
            f"--program {brief(program)}: expected script.py, script.py:function or module:function; leave --program "
            "out to get one"
        )
