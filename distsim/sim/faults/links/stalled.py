"""What nothing moves over any more, and whose traffic that is: the finding of somebody who looks at the links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.debug.records import CallRecord, Finding, State
from distsim.debug.records.kinds import Kind

if TYPE_CHECKING:
    from distsim.sim.faults.links.state import LinkState
    from distsim.sim.world import World

__all__ = ["stalled_links"]


def stalled_links(world: World, state: LinkState) -> list[Finding]:
    """One finding about all links that are cut while something waits to cross them; none, where none is."""
    if not state.down:
        return []
    stalled = [link for link in world.network.stalled() if link in state.down]
    if not stalled:
        return []
    names = [world.cluster.links[link].name for link in stalled[:3]]
    more = f" and {len(stalled) - 3} more" if len(stalled) > 3 else ""
    cut, calls = state.down[stalled[0]][0], _moving(world)
    return [
        Finding(
            Kind.NETWORK_FAULT,
            _behind(world, state, stalled, calls),
            f"nothing moves over link{'s' if len(stalled) > 1 else ''} {', '.join(names)}{more} ({cut.why})",
            group=calls[0].group if calls else None,
            call=calls[0] if calls else None,
            site=calls[0].site if calls else None,
            at_s=cut.struck_s,
            suggestion=f"Look at {names[0]}: cable, port counters, the switch's log. A second rail "
            "(detour) would have carried the traffic.",
        )
    ]


def _moving(world: World) -> list[CallRecord]:
    """Calls that have all their members and are not done, the oldest first."""
    calls = [
        r for process in world.rank_processes.values() for r in process.records if r.state is State.STARTED and r.dtypes
    ]
    return sorted(calls, key=lambda r: (r.started_s or 0.0, r.rank))


def _behind(world: World, state: LinkState, links: Sequence[int], calls: Sequence[CallRecord]) -> tuple[int, ...]:
    """The ranks whose traffic crosses *links*: those on the hosts at their ends, or behind a switch
    that they cut off, else all of the call."""
    vertices = {v.name: v for v in world.cluster.vertices}
    ends = [vertices[name] for i in links for link in [world.cluster.links[i]] for name in (link.src, link.dst)]
    hosts = {v.host for v in ends if v.host is not None} or state.cut_off({v.name for v in ends})
    members = calls[0].members if calls else tuple(range(world.world_size))
    on_hosts = tuple(r for r in members if world.slots[r].host in hosts)
    inside = all(v.kind not in ("nic", "leaf", "spine", "switch") for v in ends)
    near = [r for r in on_hosts if inside and any(v.name == world.slots[r].device for v in ends)]
    return tuple(near) or on_hosts or tuple(members)
