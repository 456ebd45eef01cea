"""Offers of machines for a training, made of simulated points, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distsim.cluster import Cluster
from distsim.errors import UsageError
from distsim.planning.buy.plan import SCALES, MachinePoints
from distsim.planning.search import PARTS, spent
from distsim.planning.tables import failure, may_be_as_good
from distsim.planning.variations import Point
from distsim.report.training.goodput import FailurePlan, Goodput, goodput
from distsim.report.training.section import TrainingCost, cost_of_time, format_duration
from distsim.text.units import format_count, plural

CLOSE = 1.05
"""Factor of the least cost (or time) up to which the other one decides, if the two cannot be told apart."""
LIMITS = {"seconds": "--deadline", "amount": "--budget"}


@dataclass(frozen=True, slots=True)
class Offer:
    """One number of nodes of one kind of machine, with the best layout that was found on it."""

    point: Point
    cost: TrainingCost
    goodput: Goodput | None = None
    """Shares of the time, where failures are counted."""

    @property
    def machine(self) -> str:
        """Return the cluster as `--on` takes it: `dgx-h100:4`."""
        return str(self.point.settings["on"])

    @property
    def layout(self) -> str:
        """Return the flags of the layout, as on a command line."""
        return " ".join(f"{name}={value}" for name, value in self.point.settings.items() if name != "on")

    @property
    def name(self) -> str:
        """Return machine and layout."""
        return f"{self.machine} {self.layout}".strip()

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return int(self.machine.rpartition(":")[2])

    @property
    def amount(self) -> float:
        """Return the cost in the currency of the price."""
        assert self.cost.amount is not None
        return self.cost.amount

    @property
    def seconds(self) -> float:
        """Return the time of the whole training."""
        return self.cost.seconds

    def of(self, measure: str) -> float:
        """Return the `amount` or the `seconds`."""
        return self.amount if measure == "amount" else self.seconds

    @property
    def figures(self) -> Mapping[str, float]:
        """Return the figures of the run, by the names that a sweep gives them."""
        return self.point.result.figures

    @property
    def range_s(self) -> tuple[float, float] | None:
        """Return the seconds between which the time lies in eight of ten cases; None without measurements."""
        figures = self.figures
        if "step_low_s" not in figures:
            return None
        of_step = self.seconds / figures["step_s"]
        return of_step * figures["step_low_s"], of_step * figures["step_high_s"]

    @property
    def bound(self) -> tuple[str, float]:
        """Return the largest part of a step, and its share."""
        shares = {name: self.figures.get(figure, 0.0) / self.figures["step_s"] for name, figure in PARTS.items()}
        name = max(shares, key=lambda name: shares[name])
        return name, shares[name]


def offer_of(point: Point, tokens: float, cluster: Cluster, plan: FailurePlan | None = None) -> Offer:
    """Return the offer of a point that has run, for a training on *tokens* tokens.

    Args:
        point: It has a step, tokens/s and a price.
        tokens: Tokens of the whole training.
        cluster: Its kind of machine, whose list price has a source.
        plan: How nodes fail; None: never.

    Raises:
        UsageError: The script writes no checkpoint, and the plan does not say how long one takes.
    """
    figures = point.result.figures
    saved = (point.result.document.get("training") or {}).get("checkpoints", {})
    shares = None
    if plan is None:
        seconds = tokens / figures["tokens_per_s"] / (1.0 - (saved.get("share") or 0.0))
    elif plan.write_s is None and not saved.get("mean_write_s"):
        raise UsageError(
            "--mtbf, --failures: the script wrote no checkpoint in the simulated steps; expected --checkpoint-takes "
            "TIME, how long one stops the job"
        )
    else:
        nodes = int(str(point.settings["on"]).rpartition(":")[2])
        shares = goodput(plan, tokens / figures["tokens_per_s"], nodes, saved.get("mean_write_s") or 0.0)
        seconds = shares.length_s / shares.good
    cost = cost_of_time(tokens, seconds, int(figures["gpus"]), figures["price"], figures.get("power_w"))
    gpu = cluster.node.gpu
    listed = gpu is not None and gpu.price == figures["price"]
    basis = gpu.price_basis if gpu is not None and listed else ""
    return Offer(point, replace(cost, energy_is_limit=bool(figures.get("power_is_limit")), price_basis=basis), shares)


@dataclass(frozen=True, slots=True)
class Choice:
    """An offer that is the best by one measure."""

    title: str
    """cheapest, fastest or recommended."""
    measure: str
    """The attribute of offers by which it is the best: `amount` or `seconds`."""
    offer: Offer
    reason: str
    """One sentence."""
    equals: tuple[Offer, ...] = ()
    """Offers that cannot be told apart from it."""


def choose(offers: Sequence[Offer], limits: Mapping[str, float]) -> list[Choice]:
    """Return the recommended offer, the cheapest and the fastest.

    Args:
        offers: At least one.
        limits: The largest `seconds` (the deadline) and `amount` (the budget), where there are any.

    Returns:
        The recommended offer first: the cheapest that meets a deadline, the fastest inside of a budget alone, and the
        cheapest of all without either; a much faster one goes before it at about the same cost. It is missing if no
        offer is within the limits.
    """
    inside = [offer for offer in offers if all(offer.of(name) <= most for name, most in limits.items())]
    measure = "seconds" if set(limits) == {"amount"} else "amount"
    choices = [_at_about_the_same(_best("recommended", measure, inside, limits), limits)] if inside else []
    return [*choices, _best("cheapest", "amount", offers, {}), _best("fastest", "seconds", offers, {})]


def _at_about_the_same(choice: Choice, limits: Mapping[str, float]) -> Choice:
    """Return *choice*, or instead of it an offer that is about as good by its measure, and better by the other one."""
    first, other = choice.offer, "seconds" if choice.measure == "amount" else "amount"
    close = [one for one in choice.equals if one.of(choice.measure) <= CLOSE * first.of(choice.measure)]
    best = min([first, *close], key=lambda offer: offer.of(other))
    if best is first:
        return choice
    more = best.of(choice.measure) / first.of(choice.measure) - 1.0
    share = best.of(other) / first.of(other)
    words = ("costs", "of the time") if choice.measure == "amount" else ("takes", "of the cost")
    reason = f"within {_limits_text(limits)}, " if limits else ""
    reason += f"it {words[0]} {more:.1%} more than {first.name}, less than the error, at {share:.0%} {words[1]}"
    return replace(choice, offer=best, reason=f"{reason}; {spent(best.point.result)}", equals=(first,))


def _best(title: str, measure: str, offers: Sequence[Offer], limits: Mapping[str, float]) -> Choice:
    ordered = sorted(offers, key=lambda offer: (offer.of(measure), offer.seconds))
    best, others = ordered[0], ordered[1:]
    equals = tuple(
        other for other in others if may_be_as_good(best.point, other.point, other.of(measure) / best.of(measure))
    )
    superlative = "the least cost" if measure == "amount" else "the shortest time"
    within = _limits_text(limits)
    reason = f"{superlative} within {within}" if within else f"{superlative} of {plural(len(offers), 'offer')}"
    if others:
        more = others[0].of(measure) / best.of(measure) - 1.0
        word = "costs" if measure == "amount" else "takes"
        unit = "more" if measure == "amount" else "longer"
        reason += f"; the next, {others[0].name}, {word} {more:.0%} {unit}"
    return Choice(title, measure, best, f"{reason}; {spent(best.point.result)}", equals)


def _limits_text(limits: Mapping[str, float]) -> str:
    return " and ".join(f"{LIMITS[name]} {limit_text(name, most)}" for name, most in limits.items())


def limit_text(name: str, value: float) -> str:
    """Return a limit with its unit: days of `seconds`, or an `amount` of money."""
    return format_duration(value) if name == "seconds" else format_count(value)


def equals_text(choice: Choice) -> str:
    """Return the sentence that says which offers cannot be told apart from *choice*; empty if all can."""
    if not choice.equals:
        return ""
    names = ", ".join(offer.name for offer in choice.equals[:3]) + (", ..." if len(choice.equals) > 3 else "")
    noun = "costs" if choice.measure == "amount" else "times"
    return f"cannot be told apart from {names}: the interval of the ratio of their {noun} contains 1"


def late_text(choice: Choice, limits: Mapping[str, float]) -> str:
    """Return the sentence that says that the likely time or cost of *choice* may exceed a limit; empty if not."""
    ends = choice.offer.range_s
    lines = []
    for name, most in limits.items():
        value = choice.offer.of(name)
        high = value if ends is None else value * ends[1] / choice.offer.seconds
        if value <= most < high:
            lines.append(f"may miss {LIMITS[name]} {limit_text(name, most)}: likely up to {limit_text(name, high)}")
    return "; ".join(lines)


def offer_json(offer: Offer) -> dict[str, Any]:
    """Return an offer as plain data: the rows of the JSON document and of the CSV file."""
    figures, cost, ends = offer.figures, offer.cost, offer.range_s
    name, share = offer.bound
    return {
        "machine": offer.machine,
        "nodes": offer.nodes,
        "gpus": int(figures["gpus"]),
        "layout": offer.layout,
        "step_s": figures["step_s"],
        "step_low_s": figures.get("step_low_s"),
        "step_high_s": figures.get("step_high_s"),
        "tokens_per_s": figures["tokens_per_s"],
        "tokens_per_s_per_gpu": figures["tokens_per_s"] / figures["gpus"],
        "mfu": figures.get("mfu"),
        "peak_gpu_memory_bytes": figures["peak_gpu_memory_bytes"],
        "gpu_memory_share": figures["gpu_memory_share"],
        "seconds": cost.seconds,
        "seconds_low": None if ends is None else ends[0],
        "seconds_high": None if ends is None else ends[1],
        "gpu_hours": cost.gpu_hours,
        "price": cost.price,
        "price_basis": cost.price_basis,
        "amount": cost.amount,
        "energy_kwh": cost.energy_kwh,
        "energy_is_limit": cost.energy_is_limit,
        "goodput": None if offer.goodput is None else offer.goodput.good,
        "checkpoint_every_s": None if offer.goodput is None else offer.goodput.every_s,
        "bound": name,
        "bound_share": share,
    }


@dataclass(frozen=True, slots=True)
class MachineComparison:
    """All offers for a training, and the choice among them."""

    script: str
    tokens: float
    limits: Mapping[str, float]
    """The largest `seconds` (the deadline) and `amount` (the budget), where there are any."""
    nodes: tuple[int, int]
    """Fewest and most nodes that could be compared."""
    offers: Sequence[Offer]
    choices: Sequence[Choice]
    machines: Sequence[MachinePoints]

    @property
    def recommended(self) -> Choice | None:
        """Return the choice within the limits, if there is one."""
        return next((choice for choice in self.choices if choice.title == "recommended"), None)

    @property
    def nearest(self) -> str:
        """Return the sentence that names the offer nearest to limits that none meets; empty if one does."""
        if self.recommended is not None:
            return ""
        nearest = min(self.offers, key=lambda offer: max(offer.of(name) / most for name, most in self.limits.items()))
        text = f"nothing meets {_limits_text(self.limits)}: the nearest is {nearest.name}, "
        text += f"{format_duration(nearest.seconds)} for {format_count(nearest.amount)}"
        most = self.nodes[1]
        if nearest.seconds > self.limits.get("seconds", nearest.seconds) and 2 * nearest.nodes > most:
            text += f"; --nodes {self.nodes[0]}..{4 * most} compares more nodes"
        return text

    @property
    def notes(self) -> list[str]:
        """Return a line for each kind of machine that has no offer, or that stops scaling, and on slow checkpoints."""
        warnings = [offer.goodput.warning for offer in self.offers if offer.goodput is not None]
        lines = list(dict.fromkeys(filter(None, warnings)))
        for machine in self.machines:
            if not machine.rows:
                lines.append(misfit_text(machine, self.nodes))
            elif machine.scales_to is not None:
                lines.append(
                    f"{machine.kind}: twice as many as {machine.scales_to} nodes give less than {SCALES:g} times the "
                    "tokens/s; larger sizes were left out"
                )
        return lines

    def document(self) -> dict[str, Any]:
        """Return the JSON document (distsim.planning.schema.BuyReport)."""
        return {
            "schema": "distsim.buy/1",
            "script": self.script,
            "tokens": self.tokens,
            "deadline_s": self.limits.get("seconds"),
            "budget": self.limits.get("amount"),
            "offers": [offer_json(offer) for offer in self.offers],
            "choices": [
                {
                    "title": choice.title,
                    "machine": choice.offer.machine,
                    "layout": choice.offer.layout,
                    "reason": choice.reason,
                    "cannot_be_told_apart": [offer.name for offer in choice.equals],
                }
                for choice in self.choices
            ],
            "nearest": self.nearest,
            "notes": self.notes,
        }


def misfit_text(machine: MachinePoints, nodes: tuple[int, int]) -> str:
    """Return why a kind of machine has no offer."""
    reasons = {size: failure(point) for size, point in sorted(machine.failed.items())}
    short = [size for size in reasons if machine.failed[size].result.figures.get("fits") == 0.0]
    if short:
        most = max(short)
        return f"{machine.kind}: it does not fit on up to {most} nodes, where it is {reasons[most]}"
    sizes = ", ".join(map(str, reasons))
    first = next(iter(reasons.values()))
    return (
        f"{machine.kind}: it runs on none of {sizes} nodes ({first}); if it needs a fixed number of GPUs, give that "
        "number of nodes: --nodes N"
    )
