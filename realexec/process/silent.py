"""Recording for the search for silent faults in this process: torch's hooks, the collector, its file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distsim.debug.diagnosis.silent.collect.collector import Collector
from distsim.debug.diagnosis.silent.collect.hooks import function_patches, global_hooks
from distsim.debug.diagnosis.silent.collect.sketch import array_of
from distsim.debug.diagnosis.silent.facts import StepFact
from distsim.debug.diagnosis.silent.facts_file import FactsFull, FactsWriter
from distsim.debug.rings.files import facts_path
from distsim.torch_compat.compiler import HAS_ANY_GLOBAL_HOOK, has_hooks_of_the_program
from distsim.torch_compat.names import Patches


class SilentHook:
    """Recorder of this process's training. It is installed with the guard, and writes once the process has a ring."""

    def __init__(self) -> None:
        self.collector: Collector | None = Collector(0, self._publish, self._read, self._note_failure)
        self._writer: FactsWriter | None = None
        self._saw_gpu = False
        self._ended = False
        self._patches = Patches()
        self._hooks = contextlib.ExitStack()

    def install(self) -> None:
        """Install the hooks by which torch reports forward passes, losses and steps."""
        current: Callable[[], Collector | None] = lambda: self.collector  # noqa: E731
        of_compiler = HAS_ANY_GLOBAL_HOOK.replaced_by(has_hooks_of_the_program) if HAS_ANY_GLOBAL_HOOK.exists() else []
        for holder, name, replacement in (*function_patches(current), *of_compiler):
            self._patches.put(holder, name, replacement)
        self._hooks.enter_context(global_hooks(current))

    def remove(self) -> None:
        """Remove the hooks, and end the recording."""
        self.end()
        self.collector = None
        self._hooks.close()
        self._patches.remove()

    def forget(self) -> None:
        """Stop in a forked child, which is not a rank."""
        self.collector = self._writer = None

    def write_beside(self, ring: Path) -> None:
        """Start to write facts next to *ring*: this process is a rank from now on."""
        self._writer = FactsWriter(facts_path(ring))

    def end(self) -> None:
        """Write the events after the last step, at the end of the process."""
        writer, collector = self._writer, self.collector
        if writer is None or collector is None or self._ended:
            return
        self._ended = True
        with contextlib.suppress(OSError):
            writer.add_rest(collector.window)
        writer.close()

    def _publish(self, step: StepFact) -> None:
        if self._writer is not None and self.collector is not None:
            self._writer.add(self.collector.facts.parameters, step)
            if self._saw_gpu:
                self._writer.add_note("", saw_gpu=True)

    def _note_failure(self) -> None:
        if self._writer is not None and self.collector is not None:
            with contextlib.suppress(OSError):
                self._writer.add_note(_why_ended(self.collector), self._saw_gpu)

    def _read(self, tensor: Any) -> Any:
        """Return the values of a tensor, or None for GPU tensors, for which the rank would have to wait."""
        if getattr(tensor, "is_cuda", False):
            self._saw_gpu = True
            return None
        return array_of(tensor)


def _why_ended(collector: Collector) -> str:
    steps = f"is searched up to step {collector.num_steps}"
    if isinstance(collector.failure, FactsFull):
        return f"{steps}: its record has reached its largest size"
    if isinstance(collector.failure, OSError):
        return f"{steps}: its record cannot be written ({collector.failure.strerror})"
    return f"{steps}: a {type(collector.failure).__name__} of the search itself"
