"""Direct exchanges: all-to-all, gather and scatter as one transfer per pair of ranks, and plain sends."""

from __future__ import annotations

from collections.abc import Iterator

from distsim.collectives.members import Members
from distsim.collectives.plan import Cost, Loads, Message, Phase

__all__ = [
    "all_to_all_loads",
    "direct_messages",
    "direct_phase",
    "longest_latency_s",
    "next_loads",
    "rooted_loads",
    "split_loads",
]

_MAX_PAIRS = 1 << 14
"""Beyond, routes between nodes are sampled: links at the ends stay exact, the fabric's are even."""

Pairs = dict[tuple[int, int], float]


def all_to_all_loads(group: Members) -> Loads:
    """Bytes over each link per byte that goes from one rank to another."""
    found: Loads = group.cached("all_to_all loads", lambda: group.loads(_even_paths(group)))
    return found


def _even_paths(group: Members) -> Iterator[tuple[tuple[int, ...], float]]:
    size, domains = group.size, group.domains
    if size * size <= _MAX_PAIRS:
        for src in range(size):
            for dst in range(size):
                if src != dst:
                    yield group.route(src, dst), 1.0
        return
    for domain in domains:
        for src in domain:
            for dst in domain:
                if src != dst:
                    yield group.route(src, dst), 1.0
    if len(domains) == 1:
        return
    # A shift by whole nodes, and by places inside them, is a permutation: each rank sends and receives once.
    width = max(len(domain) for domain in domains)
    shifts = (len(domains) - 1) * width
    taken = min(shifts, max(8, _MAX_PAIRS // size))
    for number in range(taken):
        nodes, places = divmod((2 * number + 1) * shifts // (2 * taken), width)
        for index, domain in enumerate(domains):
            other = domains[(index + nodes + 1) % len(domains)]
            for place, src in enumerate(domain):
                dst = other[(place + places) % len(other)]
                yield group.route(src, dst), shifts / taken


def rooted_loads(group: Members, root: int, to_root: bool) -> Loads:
    """The same for a gather to (or a scatter from) *root*."""

    def make() -> Loads:
        others = [member for member in range(group.size) if member != root]
        if to_root:
            return group.loads((group.route(member, root), 1.0) for member in others)
        return group.loads((group.route(root, member), 1.0) for member in others)

    found: Loads = group.cached(("rooted", root, to_root), make)
    return found


def split_loads(group: Members, pairs: Pairs, largest: float) -> Loads:
    """Loads of uneven pairs, per byte of the largest."""
    return group.loads((group.route(src, dst), nbytes / largest) for (src, dst), nbytes in pairs.items())


def next_loads(group: Members) -> Loads:
    """Bytes over each link per byte that every rank sends to the next."""
    size = group.size

    def make() -> Loads:
        return group.loads((group.route(member, (member + 1) % size), 1.0) for member in range(size))

    found: Loads = group.cached("next loads", make)
    return found


def longest_latency_s(group: Members) -> float:
    """The links' latency between the farthest two members (of a sample, in a large group)."""

    def make() -> float:
        size = group.size
        steps = [step for step in (1, 2, 3, size // 3, size // 2, size - 1) if 0 < step < size]
        members = range(0, size, max(1, size // 64))
        return max(
            (group.latency_s(group.route(a, (a + step) % size)) for a in members for step in steps),
            default=0.0,
        )

    found: float = group.cached("longest latency", make)
    return found


def direct_phase(group: Members, loads: Loads, pair_bytes: float, cost: Cost, hops: float = 1.0) -> Phase:
    """All pairs at once; *hops* is how many times the start-up of a message is paid one after the other."""
    many = len(group.domains) > 1
    latency_s = cost.hop_s(longest_latency_s(group), many)
    latency_s += (hops - 1.0) * (cost.inter_hop_s if many else cost.intra_hop_s)
    return Phase(group.with_cost(loads, cost), pair_bytes, cost.edge_bytes_per_s, latency_s)


def direct_messages(group: Members, pairs: Pairs, cost: Cost) -> list[Message]:
    """Every pair as one message, all at once."""
    messages: list[Message] = []
    for (src, dst), nbytes in pairs.items():
        links = group.route(src, dst)
        same = group.same_domain(src, dst)
        wire = cost.wire if same else cost.net_wire
        latency_s = cost.hop_s(group.latency_s(links), not same)
        messages.append(Message(links, nbytes * wire, latency_s, cost.edge_bytes_per_s * wire))
    return messages
