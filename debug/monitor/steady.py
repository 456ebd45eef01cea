"""A monitor that outlives its own faults."""

from __future__ import annotations

import contextlib
import time
import traceback

from distsim.debug.monitor.loop import Monitor
from distsim.debug.rings.files import append_private

__all__ = ["MOST_FAULTS", "GaveUp", "Steady"]

MOST_FAULTS = 50
"""Faults of its own in a row, at five a second, after which a monitor gives up."""


class GaveUp(Exception):
    """Nothing but faults of its own for `MOST_FAULTS` turns."""


class Steady(Monitor):
    """A monitor that outlives a fault of its own: it writes it down and goes on. One that can not is no healthy job's:
    it leaves the rings, and says that it knows nothing."""

    faults = 0
    """In a row: a good turn ends it."""
    _said_fault = False

    def run(self) -> int:
        try:
            return super().run()
        except Exception as error:
            if not isinstance(error, GaveUp):  # in the farewell
                self._note_fault()
            self._give_up()
            return self.exit_code

    def _turn(self) -> bool:
        try:
            over = super()._turn()
        except Exception as error:
            self._note_fault()
            self.faults += 1
            if self.faults > MOST_FAULTS:
                raise GaveUp from error
            time.sleep(0.2)
            return False
        self.faults = 0
        return over

    def _note_fault(self) -> None:
        if not self._said_fault:
            self._said_fault = True
            self._say(f"a fault in the monitor, see {self.directory}/monitor.err")
        with contextlib.suppress(OSError):
            append_private(self.directory / "monitor.err", traceback.format_exc())

    def _give_up(self) -> None:
        self.inconclusive = (
            f"the monitor gave up over faults of its own (see {self.directory}/monitor.err): nothing is known about "
            f"the job, which goes on without a guard; distsim diagnose {self.directory} reads its rings"
        )
        self._say(self.inconclusive)
        with contextlib.suppress(Exception):  # whatever is broken may break this, too
            self._write()
        with contextlib.suppress(Exception):
            self.together.goodbye()
