"""Formats the result of a comparison as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distsim.debug.messages import ranks_text
from distsim.debug.report.console import Line
from distsim.planning.equal.compare import Comparison, Deviation, How
from distsim.text.units import plural

SHOWN = 6
WHAT = {
    "output": "output of",
    "output_gradient": "gradient of the output of",
    "gradient": "gradient of",
    "parameter": "after the step:",
}


def lines(comparison: Comparison) -> Iterator[Line]:
    """Yield the report."""
    counts = ", ".join(f"{comparison.compared[kind]} {_plural(kind)}" for kind in WHAT if kind in comparison.compared)
    if comparison.first is None:
        yield Line(f"EQUAL  {plural(comparison.steps, 'step')}  {counts}", 0, 8, "bold green")
        yield Line(f"The largest distance is {comparison.farthest:.1e} of a tensor's norm.")
    else:
        first = comparison.first
        heading = ["DIFFERS", f"{WHAT[first.key.kind]} {_named(first)}", ranks_text(first.ranks)]
        yield Line("  ".join([*heading, f"at step {first.key.step + 1}"]), 0, 8, "bold red")
        yield Line(_explanation(first))
        if comparison.partial is not None and first.relation.how is How.NONE and not first.on_residual:
            part = comparison.partial
            yield Line(
                f"Before it, the output of {_named(part)} ({part.site}) was a part of a sum on each of "
                f"{ranks_text(part.ranks)}: the last place where the parts still make the other layout's tensor."
            )
        yield Line(f"made at {first.site}" if first.site else "its module was called by no line of the program's")
        names = list(dict.fromkeys(one.key.name for one in comparison.deciding))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield Line(f"Trained differently: {', '.join(names[:SHOWN])}{more}. Compared: {counts}.")
        yield Line(f"next: {_advice(first, comparison)} See docs/equal.md", style="bold")
    if comparison.replaced:
        yield Line(
            f"The second layout started with the first one's values of {_few(comparison.replaced)}, because it had "
            "drawn others. Seed the whole tensor equally in both layouts if a weight consists of several tensors."
        )
    by_reason: dict[str, list[str]] = {}
    for name, why in comparison.left_out.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        yield Line(f"Not compared: {_few(names)}: {why}.")
    yield Line("Dropout was off in both.")


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the report as plain data, schema distsim.equal/1."""
    return {
        "schema": "distsim.equal/1",
        "equal": not comparison.differs,
        "steps": comparison.steps,
        "compared": comparison.compared,
        "largest_distance": comparison.farthest,
        "first": None if comparison.first is None else _as_json(comparison.first),
        "deciding": [_as_json(one) for one in comparison.deciding],
        "started_alike": comparison.replaced,
        "left_out": comparison.left_out,
    }


def _as_json(one: Deviation) -> dict[str, Any]:
    far = one.relation.distance
    return {
        "kind": one.key.kind,
        "name": one.key.name,
        "step": one.key.step + 1,
        "ranks": list(one.ranks),
        "relation": one.relation.how.value,
        "factor": one.relation.factor,
        "distance": far if far < float("inf") else None,
        "threshold": one.threshold,
        "site": one.site,
        "explanation": _explanation(one),
    }


def _explanation(one: Deviation) -> str:
    ranks, name, how = ranks_text(one.ranks), _named(one), one.relation.how
    if one.on_residual:
        return (
            f"Each of {ranks} added its own part to a tensor that is equal on all ranks: the parts were not added up. "
            "Their sum equals the other layout's tensor."
        )
    if how is How.SUM and one.relation.detail == "mean":
        return f"Each of {ranks} has a different {_thing(one)} of {name}; their mean equals the other layout's."
    if how is How.SUM:
        return f"Each of {ranks} has a part of the {_thing(one)} of {name}: the parts were not added up."
    if how is How.MULTIPLE:
        return f"On {ranks} it is {one.relation.factor:g} times the other layout's."
    far = (
        f"{one.relation.distance:.2g} of its norm"
        if one.relation.distance < float("inf")
        else "not a number, or the sizes differ"
    )
    return (
        f"The tensors of {ranks} are not equal to the other layout's, and neither are their concatenation and their "
        f"sum. The distance is {far}; up to {one.threshold:.1g} is rounding."
    )


def _advice(one: Deviation, comparison: Comparison) -> str:
    ranks, how = ranks_text(one.ranks), one.relation.how
    if one.on_residual or (how is How.NONE and comparison.partial is not None):
        part = one if one.on_residual or comparison.partial is None else comparison.partial
        return f"all_reduce what {_named(part)} computes over {ranks} (or reduce_scatter it) before it is used."
    if how is How.SUM and one.relation.detail == "mean":
        return f"Average the gradient over {ranks} before the step."
    if how is How.SUM:
        return f"all_reduce the gradient over {ranks} before the step."
    if how is How.MULTIPLE:
        return "Look for a reduction too many, or for a division that is missing or made twice."
    return f"Compare what {_named(one)} computes at the line above in both layouts."


def _named(one: Deviation) -> str:
    module = f" ({one.module})" if one.module else ""
    return f"{one.key.name}{module}" if one.key.name else f"the model{module}"


def _thing(one: Deviation) -> str:
    return {"output": "output", "output_gradient": "gradient", "gradient": "gradient"}.get(one.key.kind, "value")


def _plural(kind: str) -> str:
    return {"output_gradient": "gradients of outputs"}.get(kind, f"{kind}s")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
