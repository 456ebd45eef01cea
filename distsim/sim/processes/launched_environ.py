"""What a launcher says to the ranks it starts: torchrun's names, where the program starts its ranks itself."""

from __future__ import annotations

import os

from distsim.sim.isolation.environ import TORCHRUN, without_launchers
from distsim.sim.isolation.process import SimProcess

__all__ = ["launcher_environ", "place_environ", "was_told_of_torchrun"]


def launcher_environ(process: SimProcess) -> None:
    """*process* starts its ranks itself, so torchrun did not start it: of torchrun's names it has those that it
    set itself and, as it has seen them until now, those that the shell has as well. One that asked whether
    torchrun started it has built on the answer (Lightning's `ddp_spawn`): it keeps what it has."""
    if was_told_of_torchrun(process):
        process.world.note(
            "the program was told that torchrun started it, then started its ranks: they have torchrun's variables "
            f"(WORLD_SIZE={process.environ.get(b'WORLD_SIZE', b'').decode()}); simulate as many ranks as it starts"
        )
        return
    shell = without_launchers(process.world.host.environ)
    defaults: dict[bytes, bytes] = process.notes.environ_defaults
    for key in [*map(os.fsencode, TORCHRUN), *(k for k in process.environ if k.startswith(b"TORCHELASTIC_"))]:
        if key in process.changed_environ or key in shell:
            continue
        process.environ.pop(key, None)
        if key in defaults:
            os.environb[key] = defaults[key]


def was_told_of_torchrun(process: SimProcess) -> bool:
    """Whether *process* has asked torch whether torchrun started it, and was told so."""
    return process.notes.told_of_torchrun


def place_environ(parent: SimProcess, rank: int) -> dict[bytes, bytes]:
    """What torchrun would say of the place of *rank* to a child of the launcher *parent*, except what that set."""
    copies = parent.world.processes[: len(parent.world.slots)]
    said = copies[rank % len(copies)].environ
    keys = [key for key in map(os.fsencode, TORCHRUN) if key not in parent.changed_environ]
    return {key: said[key] for key in keys if key in said}
