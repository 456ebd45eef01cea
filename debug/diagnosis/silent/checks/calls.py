"""Calls whose arguments are wrong whatever the tensors hold, and steps that find nothing to do."""

from __future__ import annotations

from collections.abc import Iterator

from distsim.debug.diagnosis.silent.finding import Level, Sighting, SilentKind
from distsim.debug.diagnosis.silent.replicas import ReplicaSet
from distsim.debug.diagnosis.silent.view import Key, View

__all__ = ["aliased_outputs", "gradient_reduce_op", "step_without_gradients"]

Sets = dict[Key, list[ReplicaSet]]
NO_SUMS = ("MAX", "MIN", "PRODUCT")


def aliased_outputs(view: View, sets: Sets) -> Iterator[Sighting]:
    """The outputs of a gather share memory: each holds what came last."""
    for rank in view.facts:
        for number, window in enumerate(view.windows(rank)):
            for op, _, site in window.aliased:
                yield Sighting(
                    SilentKind.ALIASED_OUTPUTS,
                    Level.ERROR,
                    (rank,),
                    "",
                    number + 1,
                    site,
                    "",
                    f"The outputs of {op} at {site} share memory, so all of them hold what came last.",
                    "Give each output its own memory: [torch.empty_like(t) for _ in range(world_size)].",
                )


def gradient_reduce_op(view: View, sets: Sets) -> Iterator[Sighting]:
    """A parameter's gradient is reduced by an operator that makes no sum and no mean."""
    for rank in view.facts:
        for number, window in enumerate(view.windows(rank)):
            for call in window.calls:
                if call.reduce_op not in NO_SUMS:
                    continue
                for parameter in sorted(call.gradients):
                    yield Sighting(
                        SilentKind.GRADIENT_REDUCE_OP,
                        Level.ERROR,
                        tuple(sorted(call.ranks)),
                        view.facts[rank].parameters[parameter].name,
                        number + 1,
                        call.site,
                        "",
                        f"The gradient of {{tensor}} is reduced with {call.reduce_op} by {call.op} at {call.site}.",
                        "Reduce gradients with ReduceOp.SUM and divide by the number of ranks, or with AVG.",
                    )


def step_without_gradients(view: View, sets: Sets) -> Iterator[Sighting]:
    """An optimizer steps twice in turn, and no parameter of it has a gradient on any rank."""
    for optimizer in sorted({step[0] for step in view.order}):
        idle = 0
        for number, steps in view.steps_of(optimizer):
            has_none = all(
                step.parameters and step.without_gradient == len(step.parameters) and not step.has_closure
                for step in steps.values()
            )
            idle = idle + 1 if has_none else 0
            if idle == 2:
                first = min(steps)
                yield Sighting(
                    SilentKind.STEP_WITHOUT_GRADIENTS,
                    Level.WARNING,
                    tuple(sorted(steps)),
                    "",
                    number,
                    steps[first].site,
                    "",
                    "The optimizer has made two steps, and no parameter of it had a gradient on any rank: "
                    "nothing trains.",
                    "Give the optimizer the parameters that backward reaches (make it after the model is moved, "
                    "wrapped "
                    "or sharded), and do not clear gradients between backward and step.",
                )
                break
