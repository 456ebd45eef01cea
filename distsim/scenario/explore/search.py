"""Explores the orders of a program within a budget, and reports what that proves."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from distsim.errors import DistsimError
from distsim.scenario.explore.budget import Budget
from distsim.scenario.explore.tree import NotRepeatable, OrderTree
from distsim.scenario.explore.words import differences, location, who
from distsim.scenario.shrink import shrink
from distsim.sim.kernel.chooser import STRIKES, Orders, Priorities, Replay, ReplayString, Strike
from distsim.sim.kernel.steps import NextOperation, Trace, class_of
from distsim.text.untrusted_input import brief

_perf_counter = time.perf_counter
FURTHER_S = 2.0
"""Wall seconds for which a search goes on after a failing order, to find a simpler one and to count."""
LONGEST_S = 3_600.0
"""Expected wall seconds of an exploration of all orders above which it is refused after one run."""
MOST_LINES = 200
"""Lines with who came last there, beyond which none is listed."""
LARGEST_BATCH = 32
"""Runs that a worker gets at a time, at most."""
BATCHES = 16
"""Batches of equal size in a row, for each that is under way; then they become larger."""
MOST_PAIRS = 200
"""Pairs of faults up to which all are explored without a budget."""
DEPTH = 3
"""Number of orderings that a bug needs, for random priorities."""


@dataclass(slots=True)
class RunResult:
    """What one run did."""

    failed: bool
    kind: str
    """How it ended in a few words; failing runs are alike if this is equal."""
    signature: Hashable
    """Everything that must be equal if the same choices are made again."""
    payload: Any = None
    """The caller's own report."""


Attempt = Callable[[Orders], RunResult]
Ran = tuple[Orders, RunResult]
Space = tuple[Orders, OrderTree]
"""What is not chosen by the tree, and the tree."""


class RunExecutor(Protocol):
    """Where the runs of an exploration take place."""

    queue: int
    """Batches of runs that are under way at a time."""

    def submit(self, batch: Sequence[Orders]) -> Future[Any]:
        """Begin some runs."""
        ...

    def collect(self, future: Future[Any]) -> list[Ran]:
        """Return the results of a batch that has ended, in its order. Its orders have the trace."""
        ...


class _Here:
    """Runs in this process, one by one."""

    queue = 1

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def submit(self, batch: Sequence[Orders]) -> Future[Any]:
        """Run the batch before returning."""
        future: Future[Any] = Future()
        future.set_result([(orders, self._attempt(orders)) for orders in batch])
        return future

    def collect(self, future: Future[Any]) -> list[Ran]:
        """Return the results of the batch."""
        return list(future.result())


class TooManyOrders(DistsimError):
    """All orders are asked for, and they are too many."""


@dataclass(slots=True)
class Failing:
    """A failing order."""

    ran: RunResult
    replay: str
    """String that repeats it."""
    words: list[str]
    """What is different from the usual order; empty if the usual one fails."""

    @property
    def size(self) -> tuple[int, int, str]:
        """Return how far it is from the usual order; no two failing orders have the same."""
        return len(self.words), len(self.replay), self.replay


@dataclass(slots=True)
class Explored:
    """Result of an exploration."""

    runs: int = 0
    classes: int = 0
    failing_classes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Failing classes by how they end."""
    least: int = 1
    """Lower bound of the number of classes."""
    is_exhausted: bool = False
    first: RunResult | None = None
    """The run in the usual order."""
    failing: Failing | None = None
    """The failing order with the fewest differences from the usual one."""
    not_repeatable: str = ""
    """What did not repeat; the classes then prove nothing."""
    bounds: str = ""
    """What random priorities find at least."""
    polls: dict[str, None] = field(default_factory=dict)
    clocks: dict[str, None] = field(default_factory=dict)
    unexplored: dict[str, None] = field(default_factory=dict)
    sometimes: dict[str, bool] = field(default_factory=dict)
    """Whether what the program expects in some orders has held in one."""
    places: int = 0
    """Places at which a fault struck."""
    pairs: int = 0
    """Pairs of places at which two faults struck."""
    most_classes: str = ""
    """Operation that is reordered most often."""
    seen_last: dict[tuple[str, str], int] = field(default_factory=dict)
    """Classes by line and by who came last there."""
    wall_s: float = 0.0

    @property
    def is_proof(self) -> bool:
        """Return whether no order that the model has can fail."""
        return self.is_exhausted and self.failing is None and not self.not_repeatable and not self.unexplored

    @property
    def headline(self) -> str:
        """Return what was explored and found, in one line."""
        if self.not_repeatable:
            return f"not repeatable: {self.not_repeatable}"
        if self.failing is not None and not self.failing.words:
            return "the usual order fails"
        if self.failing is not None:
            fail = "fails" if self.failing_classes == 1 else "fail"
            if self.is_exhausted:
                return f"{self.failing_classes:,} of {_classes(self.classes)} {fail}"
            return f"the usual order passes; {self.failing_classes:,} of the first {_classes(self.classes)} {fail}"
        if not self.is_exhausted:
            return (
                f"not exhausted: {_runs(self.runs)}, {_classes(self.classes)}, none fails; at least "
                f"{_classes(self.least)}"
            )
        if self.unexplored:
            return f"explored in part: {_classes(self.classes)} of orders, none fails"
        if self.classes == 1:
            return "one class: no order of calls makes a difference"
        return f"all {_classes(self.classes)} of orders: none fails"

    @property
    def last_lines(self) -> list[str]:
        """Return who came last at which line, and in how many classes."""
        counts = sorted(self.seen_last.items()) if len(self.seen_last) <= MOST_LINES else []
        return [f"{line}: {last} last in {count:,}" for (line, last), count in counts if line]

    @property
    def summary(self) -> str:
        """Return the headline with the number of runs and the time."""
        return f"{self.headline}  {_runs(self.runs)}  {self.wall_s:.1f} s"

    @property
    def details(self) -> list[str]:
        """Return further lines: what limits the proof, and what would extend it."""
        lines = []
        if self.places:
            pairs = f", and two at {self.pairs:,} pairs of them" if self.pairs else ""
            lines.append(f"a fault struck at each of {self.places:,} places{pairs}")
        if self.bounds:
            lines.append(self.bounds)
        lines += [f"never true: sometimes(..., {name!r})" for name, holds in self.sometimes.items() if not holds]
        if self.polls:
            lines.append(f"polling loops ({', '.join(self.polls)}) look again when the others have stopped")
        if self.clocks:
            lines.append(f"each order has one time, and the program reads a clock ({', '.join(self.clocks)})")
        if self.unexplored:
            lines.append(f"not proven, with one order each: the program {'; '.join(self.unexplored)}")
        if not self.is_exhausted and self.failing is None and self.most_classes:
            lines.append(f"most orders are of {self.most_classes}")
        return lines


def _classes(number: int) -> str:
    return "one class" if number == 1 else f"{number:,} classes"


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number:,} runs"


class OrderSearch:
    """One exploration.

    Args:
        attempt: Runs the program once, from the same state each time.
        budget: How much to try.
        kinds: What else to try beside orders (budget.KINDS).
        program: Hash of the program, for replay strings.
        main_file: The program's file, whose name words leave out.
        on_progress: Called after each run with the result so far.
        workers: Where further runs take place; None: in this process.
    """

    def __init__(
        self,
        attempt: Attempt,
        budget: Budget,
        kinds: Sequence[str] = (),
        program: str = "",
        main_file: str = "",
        on_progress: Callable[[Explored], None] = lambda _: None,
        workers: RunExecutor | None = None,
    ) -> None:
        self._attempt, self._budget, self._kinds = attempt, budget, kinds
        self._program, self._main_file, self._on_progress = program, main_file, on_progress
        self._result = Explored()
        self._workers: RunExecutor = _Here(attempt) if workers is None else workers
        self._struck: set[tuple[Strike, ...]] = set()
        self._started_s = _perf_counter()
        self._failed_s: float | None = None
        self._usual = Trace(Replay({}))
        self._seen: set[int] = set()
        self._reordered: Counter[str] = Counter()

    def run(self) -> Explored:
        """Explore, and return the result.

        Raises:
            TooManyOrders: All orders are asked for, and they would take longer than LONGEST_S.
        """
        result = self._result
        try:
            self._explore()
        except NotRepeatable as error:
            result.not_repeatable = self._not_repeated(error)
        result.wall_s = _perf_counter() - self._started_s
        for lines in (result.polls, result.clocks):
            shown = [location(line, self._main_file).strip(" ()") for line in lines]
            lines.clear()
            lines.update(dict.fromkeys(shown))
        if self._reordered:
            result.most_classes = self._reordered.most_common(1)[0][0]
        return result

    def _explore(self) -> None:
        result = self._result
        tree = OrderTree()
        root = tree.begin_run()
        assert root is not None
        usual = Orders(root, explores_timeouts="timeout" in self._kinds)
        ran = self._attempt(usual)
        self._ended(usual, ran, tree)
        if result.failing is not None:
            return
        self._usual, result.first = usual.trace, ran
        self._repeat(usual, ran)
        result.least = tree.least_classes
        self._refuse_too_many()
        strikes = self._strikes(usual.trace)
        self._search([(usual, tree), *self._other_spaces(usual, strikes)])
        if result.is_exhausted and result.failing is None:
            self._strike_twice(usual, strikes)
        if result.is_exhausted and result.failing is None and result.runs > 2:
            self._repeat(usual, ran)
        elif result.failing is not None and not result.is_exhausted and result.failing.words:
            self._shorten(result.failing)

    def _strikes(self, usual: Trace) -> list[Strike]:
        """Return the faults that are explored: at each call of a rank its death, at each of rank 0 a lost store."""
        return [
            Strike(kind, rank, call)
            for kind in STRIKES
            if kind in self._kinds
            for rank, calls in sorted(usual.calls.items())
            if kind == "kill" or rank == 0
            for call in range(1, calls + 1)
        ]

    def _other_spaces(self, usual: Orders, strikes: Sequence[Strike]) -> Iterator[Space]:
        """Yield what is explored beside the orders of an undisturbed run."""
        if "buffered" in self._kinds:
            yield replace(usual, buffered=True), OrderTree()
        for strike in strikes:
            yield replace(usual, strikes=(strike,)), OrderTree()

    def _strike_twice(self, usual: Orders, strikes: Sequence[Strike]) -> None:
        """Explore two faults on different ranks, as far as the budget goes, or all of a few pairs."""
        pairs = [
            pair
            for pair in itertools.combinations(strikes, 2)
            if pair[0].rank != pair[1].rank or pair[0].kind != pair[1].kind
        ]
        if pairs and (self._budget != Budget() or len(pairs) <= MOST_PAIRS):
            spaces = [(replace(usual, strikes=pair), OrderTree()) for pair in pairs]
            self._run_each(lambda: self._branches(spaces), self._budget)

    def _refuse_too_many(self) -> None:
        result = self._result
        each_s = (_perf_counter() - self._started_s) / max(1, result.runs)
        if self._budget == Budget() and result.least * each_s > LONGEST_S:
            raise TooManyOrders(
                f"explore='all': at least {_classes(result.least)}, which take longer than {LONGEST_S / 3600:g} hour: "
                "expected a number of runs (explore=200), a time (explore='60s'), or a program with fewer rounds"
            )

    # -- many runs

    def _search(self, spaces: Sequence[Space]) -> None:
        """Search depth-first; if that cannot be finished, use half of the budget for random priorities."""
        result, trees = self._result, [tree for _, tree in spaces]
        usual = spaces[0][0]
        each_s = (_perf_counter() - self._started_s) / max(1, result.runs)
        fits = self._budget.runs if self._budget.wall_s is None else int(self._budget.wall_s / each_s)
        shares = fits is not None and result.least + len(spaces) - 1 > fits
        if shares:
            for tree in trees:
                tree.shuffle(random.Random(0))

        self._run_each(lambda: self._branches(spaces, shares), self._budget.half if shares else self._budget)
        result.is_exhausted = all(tree.is_exhausted for tree in trees)
        if not result.is_exhausted:
            result.least = max(result.least, result.classes + 1)
            if shares:
                self._draw(usual)

    def _branches(self, spaces: Sequence[Space], shares: bool = False) -> Iterator[Space]:
        """Yield further runs of the spaces one after the other, or of each in its turn if they share a budget."""
        while True:
            in_order = sorted(spaces, key=lambda space: space[1].num_begun) if shares else spaces
            begun = ((self._begin(tree, orders), tree) for orders, tree in in_order)
            following = next(((branch, tree) for branch, tree in begun if branch is not None), None)
            if following is None:
                return
            yield following

    def _draw(self, usual: Orders) -> None:
        """Run with random priorities until the budget is used up."""
        steps = max(1, len(usual.trace.steps))
        actors = max(1, len({Priorities.actor(step.offer) for step in usual.trace.steps}))
        seeds = itertools.count(1)

        def draws() -> Iterator[tuple[Orders, None]]:
            for seed in seeds:
                yield replace(usual, chooser=Priorities(seed, steps, DEPTH)), None

        before = self._result.runs
        self._run_each(draws, self._budget)
        drawn = self._result.runs - before
        if not drawn:
            return
        percent = 100.0 * pct_bound(actors, steps, DEPTH, drawn)
        self._result.bounds = (
            f"PCT, {actors} actors, {steps} steps, {_runs(drawn)}: a bug of {DEPTH} orderings is found with at least "
            f"{percent:.2g} %"
        )

    @staticmethod
    def _begin(tree: OrderTree, orders: Orders) -> Orders | None:
        """Return *orders* with a further branch of *tree*; None if there is none now."""
        branch = tree.begin_run()
        return None if branch is None else replace(orders, chooser=branch)

    def _run_each(self, further: Callable[[], Iterator[tuple[Orders, OrderTree | None]]], budget: Budget) -> None:
        """Run what *further* yields, with its tree, until the budget is used up or nothing is left.

        It is called again whenever runs have ended, because they may have left new branches.
        """
        under_way: dict[Future[Any], list[OrderTree | None]] = {}
        while True:
            while len(under_way) < self._workers.queue and not self._is_over(budget):
                begun = sum(map(len, under_way.values())) + self._result.runs
                most = min(LARGEST_BATCH, 1 + self._result.runs // (BATCHES * self._workers.queue))
                batch = list(itertools.islice(further(), min(most, budget.runs_after(begun))))
                if not batch:
                    break
                future = self._workers.submit([orders for orders, _ in batch])
                under_way[future] = [tree for _, tree in batch]
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                for (orders, ran), tree in zip(self._workers.collect(future), under_way.pop(future), strict=True):
                    self._ended(orders, ran, tree)

    def _is_over(self, budget: Budget) -> bool:
        now_s = _perf_counter()
        if self._failed_s is not None and now_s - self._failed_s > FURTHER_S:
            return True
        return budget.over(self._result.runs, now_s - self._started_s)

    # -- one run that has ended

    def _ended(self, orders: Orders, ran: RunResult, tree: OrderTree | None) -> bool:
        """Count the class of a run; return False if it ended early because its orders are explored elsewhere."""
        result, trace = self._result, orders.trace
        result.runs += 1
        self._struck.add(orders.strikes)
        result.places, result.pairs = (sum(len(one) == number for one in self._struck) for number in (1, 2))
        if tree is not None:
            tree.end_run(trace)
            result.least = max(result.least, result.classes, tree.least_classes)
        result.polls |= trace.polls
        result.clocks |= trace.clocks
        result.unexplored |= trace.unexplored
        for name, holds in trace.sometimes.items():
            result.sometimes[name] = result.sometimes.get(name, False) or holds
        if trace.is_cut:
            return False
        class_number = hash((class_of(trace), orders.buffered, orders.strikes))
        if class_number not in self._seen:
            self._seen.add(class_number)
            result.classes += 1
            self._count_orders(trace)
            if ran.failed:
                result.failing_classes += 1
                result.kinds[ran.kind] += 1
        if ran.failed:
            self._failed_s = self._failed_s or _perf_counter()
            is_first = result.runs == 1
            words = [] if is_first else self._words(orders)
            failing = Failing(ran, str(ReplayString.of(orders, self._program)), words)
            if result.failing is None or failing.size < result.failing.size:
                result.failing = failing
        self._on_progress(result)
        return True

    def _words(self, orders: Orders) -> list[str]:
        words = differences(self._usual, orders.trace, self._main_file)
        words[:0] = map(str, orders.strikes)
        if orders.buffered:
            words.insert(0, "sends return before they are received")
        return words or ["the order is the usual one"]

    def _count_orders(self, trace: Trace) -> None:
        last: dict[str, str] = {}
        for step in trace.steps:
            last[step.offer.line] = who(step.offer)
            if step.races:
                self._reordered[step.offer.label + location(step.offer.line, self._main_file)] += 1
        for line, last_one in last.items():
            self._result.seen_last[line, last_one] = self._result.seen_last.get((line, last_one), 0) + 1

    # -- repeatability

    def _repeat(self, orders: Orders, ran: RunResult) -> None:
        """Repeat a run.

        Raises:
            NotRepeatable: It does something else.
        """
        again = Orders(
            Replay({step.index: step.offer.id for step in orders.trace.steps}, strict=False),
            orders.buffered,
            orders.strikes,
            orders.explores_timeouts,
        )
        second = self._attempt(again)
        self._result.runs += 1
        for before, now in zip(orders.trace.steps, again.trace.steps, strict=False):
            if before.offer != now.offer:
                raise NotRepeatable(before.index, [before.offer], [now.offer])
        lengths = len(orders.trace.steps), len(again.trace.steps)
        if lengths[0] != lengths[1]:
            shorter = min(lengths)
            before_, now_ = ([step.offer for step in one.trace.steps[shorter:][:1]] for one in (orders, again))
            raise NotRepeatable(shorter, before_, now_)
        if ran.signature != second.signature:
            raise NotRepeatable(-1, [], [], _first_difference(ran.signature, second.signature))

    def _not_repeated(self, error: NotRepeatable) -> str:
        run = self._result.runs
        if error.step < 0:
            text = f"run {run} made the same calls as run 1, and its output or its errors were different"
            return f"{text}: {error.difference}" if error.difference else text
        before = {offer.id: offer for offer in error.before}
        now = {offer.id: offer for offer in error.now}
        new = next((offer for one, offer in now.items() if before.get(one) != offer), None)
        gone = next((offer for one, offer in before.items() if now.get(one) != offer), None)
        did = "nobody did anything" if new is None else f"{_did(new)}"
        had = "all had ended before" if gone is None else f"{_did(gone)} before"
        return f"step {error.step + 1} of run {run} did not repeat: {did}, where {had}"

    # -- the simplest order, if not all are known

    def _shorten(self, failing: Failing) -> None:
        """Leave out unusual choices as long as the program fails alike."""
        string = ReplayString.parse(failing.replay)

        def fails(choices: Sequence[tuple[int, str]]) -> bool:
            shorter = ReplayString(dict(choices), string.buffered, string.strikes, string.explores_timeouts)
            orders = shorter.orders(strict=False)
            ran = self._attempt(orders)
            self._result.runs += 1
            if not ran.failed or ran.kind != failing.ran.kind:
                return False
            words = self._words(orders)
            if len(words) <= len(failing.words):
                failing.ran, failing.words = ran, words
                failing.replay = str(ReplayString.of(orders, self._program))
            return True

        shrink(list(string.choices.items()), fails, singly=True)


def _first_difference(before: Any, now: Any) -> str:
    """Return the first line that differs in the texts of two signatures."""
    if isinstance(before, tuple) and isinstance(now, tuple):
        parts = itertools.zip_longest(before, now, fillvalue="")
        return next((text for one, other in parts if one != other and (text := _first_difference(one, other))), "")
    lines = itertools.zip_longest(str(before).splitlines(), str(now).splitlines(), fillvalue="nothing")
    return next((f"{brief(new)}, where it was {brief(old)} before" for old, new in lines if old != new), "")


def _did(offer: NextOperation) -> str:
    return f"{who(offer)} did `{offer.label}`"


def pct_bound(actors: int, steps: int, depth: int, runs: int) -> float:
    """Return the least probability with which *runs* with random priorities find a bug of *depth* orderings.

    Args:
        actors: Tasks of the program.
        steps: Operations of one run.
        depth: Orderings that the bug needs.
        runs: Number of runs.

    Source: Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010,
    theorem 9: 1 / (n k^(d-1)) for one run.
    """
    return float(1.0 - (1.0 - 1.0 / (actors * steps ** (depth - 1))) ** runs)
