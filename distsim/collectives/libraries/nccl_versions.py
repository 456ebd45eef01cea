"""The figures of NCCL's own cost model, release by release: what its tuning believed when.

Source: NVIDIA/nccl, src/graph/tuning.cc at the tags v2.16.5-1 to v2.30.3-1 (from 2.30 on also this order of the
table); times in us, bandwidths in GB/s, as there. Releases without a change of their own are as the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

__all__ = ["Tuning", "tuning_of"]

Three = tuple[float, float, float]
"""By protocol (LL, LL128, Simple), or by nodes (1, 2, more)."""
Rows = tuple[Three, Three, Three, Three]
"""By generation: Volta, Ampere, Hopper, Blackwell."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """One release's figures."""

    base_us: Mapping[str, Three]
    nvlink_us: Mapping[str, Three]
    pci_us: Mapping[str, Three]
    net_us: Mapping[str, Three]
    ll_max: Rows
    """Of LL: by generation on one node; between nodes row 0 stands for Intel, 1 for AMD."""
    ring_ll128: Rows
    """Of one channel, as the next three."""
    tree_ll128: Rows
    tree_simple: Rows
    nvls_tree: Rows | None
    """None where NVLS was reckoned otherwise (before 2.28)."""
    ring_ll_inside: float = 0.5
    """LL's share of a ring's bandwidth: on one node where nothing is added up."""
    ring_ll_share: float = 0.5
    """The same otherwise."""
    pat_share: float = 0.75
    extra_inter_steps: int = 0
    """Of a ring's all_reduce: 2 before 2.23, which counted 2 * nodes."""
    plateau: Three = (1.9, 1.4, 1.4)
    """What a ring's latency is multiplied with: Volta, Ampere, newer."""


_TREE_SLOW = (0.6, 1.25, 28.0)
_RING = (0.6, 1.9, 3.4)
_V218 = Tuning(
    base_us={"Tree": (6.8, 14.0, 0.0), "Ring": (6.6, 14.0, 8.4), "NVLS": (0, 0, 23.0), "NVLSTree": (0, 0, 23.0)},
    nvlink_us={"Tree": (0.6, 1.25, 4.0), "Ring": _RING},
    pci_us={"Tree": (1.0, 1.9, 6.0), "Ring": (1.0, 2.5, 5.7)},
    net_us={"Tree": (5.0, 8.5, 14.0), "Ring": (2.7, 4.0, 14.0), "NVLS": (0, 0, 18.0), "NVLSTree": (0, 0, 19.0)},
    ll_max=((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (87.7, 22.5, 19.0), (87.7, 22.5, 19.0)),
    ring_ll128=((20.0,) * 3, (20.0,) * 3, (36.7,) * 3, (36.7,) * 3),
    tree_ll128=((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (36.7, 36.7, 29.0)),
    tree_simple=((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (38.7, 41.4, 36.0)),
    nvls_tree=None,
    ring_ll_inside=1 / 3,
    ring_ll_share=0.25,
    pat_share=0.85,
    extra_inter_steps=2,
)
_V216 = replace(
    _V218,
    base_us={"Tree": (4.4, 4.4, 0.0), "Ring": (3.6, 10.0, 8.4), "NVLS": (0, 0, 40.0)},
    nvlink_us={"Tree": (0.52, 1.25, 28.0), "Ring": (0.47, 1.9, 3.4)},
    pci_us={"Tree": (1.0, 1.9, 28.0), "Ring": (1.0, 2.5, 5.7)},
    net_us={"Tree": (5.0, 8.5, 28.0), "Ring": (2.7, 4.0, 9.6)},
    plateau=(1.9, 1.9, 1.5),
)
_V219 = replace(
    _V218,
    base_us={"Tree": (6.8, 14.0, 0.0), "Ring": (6.6, 14.0, 8.4)},
    nvlink_us={"Tree": _TREE_SLOW, "Ring": _RING, "NVLS": (0, 0, 23.0), "NVLSTree": (0, 0, 23.0)},
    pci_us={"Tree": (1.0, 1.9, 28.0), "Ring": (1.0, 2.5, 5.7)},
    net_us={"Tree": (5.0, 8.5, 28.0), "Ring": (2.7, 4.0, 14.0), "NVLS": (0, 0, 18.0), "NVLSTree": (0, 0, 14.0)},
)
_V221 = replace(
    _V219,
    nvlink_us={"Tree": _TREE_SLOW, "Ring": _RING, "NVLS": (0, 0, 25.0), "NVLSTree": (0, 0, 25.0)},
    ll_max=((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (141.0, 45.0, 35.0)),
    ring_ll_inside=0.5,
    ring_ll_share=0.5,
)
_V223 = replace(
    _V221,
    base_us={"Tree": (6.8, 14.0, 8.4), "Ring": (6.6, 14.0, 8.4), "PAT": (8.0, 8.0, 8.0)},
    nvlink_us={**_V221.nvlink_us, "Tree": (0.6, 1.25, 4.0), "PAT": (0, 0, 4.0)},
    pci_us={"Tree": (1.0, 1.9, 4.0), "Ring": (1.0, 2.5, 5.7), "PAT": (0, 0, 4.0)},
    net_us={**_V221.net_us, "Tree": (5.0, 8.5, 14.0), "PAT": (0, 0, 14.0)},
    extra_inter_steps=0,
)
_V224 = replace(_V223, pat_share=0.75)
_V225 = replace(
    _V224,
    ll_max=(*_V224.ll_max[:3], (282.0, 90.0, 70.0)),
    ring_ll128=(*_V224.ring_ll128[:3], (73.4,) * 3),
    tree_ll128=(*_V224.tree_ll128[:3], (73.4, 73.4, 58.0)),
    tree_simple=(*_V224.tree_simple[:3], (77.4, 82.8, 72.0)),
)
_V228 = replace(
    _V225,
    net_us={**_V225.net_us, "NVLSTree": (0, 0, 20.9)},
    ring_ll128=(*_V225.ring_ll128[:3], (73.4, 34.6, 73.4)),
    tree_ll128=(*_V225.tree_ll128[:3], (55.6, 31.67, 20.0)),
    tree_simple=(*_V225.tree_simple[:3], (70.0, 42.8, 24.0)),
    nvls_tree=((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 43.8)),
)
_V229 = replace(_V228, ring_ll128=(*_V228.ring_ll128[:3], (40.0,) * 3))
_V230 = replace(_V229, nvls_tree=(*(_V229.nvls_tree or ())[:3], (0.0, 96.0, 80.0)))

_SINCE = (
    (30, _V230),
    (29, _V229),
    (28, _V228),
    (25, _V225),
    (24, _V224),
    (23, _V223),
    (21, _V221),
    (19, _V219),
    (18, _V218),
    (0, _V216),
)


@cache
def tuning_of(version: tuple[int, int]) -> Tuning:
    """The figures of NCCL *version* (major, minor); newer releases than known are as the newest."""
    return next(tuning for since, tuning in _SINCE if version >= (2, since))
