"""Figures of scenarios and sweeps (`virtual_time_s`, `busbw_bytes_per_s.all_reduce`) as people read them."""

from __future__ import annotations

from distsim.text.units import format_bandwidth, format_bytes, format_time

__all__ = ["figure_name", "figure_text", "figure_unit", "time_unit"]


SHARES = ("busiest_link", "mfu", "hfu", "gpu_memory_share")


def time_unit(end_s: float) -> tuple[float, str]:
    """Return the factor and unit of seconds on an axis with this end."""
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if end_s < limit:
            return scale, unit
    return 1.0, "s"


def figure_name(name: str) -> str:
    """`virtual_time_s` -> `virtual time`; the unit is in the values."""
    kind, _, rest = name.partition(".")
    for ending in ("_bytes_per_s", "_bytes", "_s") if not kind.startswith("tokens") else ():
        kind = kind.removesuffix(ending)
    return " ".join(part for part in (kind.replace("_", " "), rest) if part)


def figure_text(name: str, value: float | None) -> str:
    """A figure with its unit."""
    if value is None:
        return "-"
    kind = name.partition(".")[0]
    if kind.endswith("_bytes_per_s"):
        return format_bandwidth(value)
    if kind.endswith("_bytes"):
        return format_bytes(int(value))
    if kind.endswith("_s") and not kind.endswith("per_s"):
        return format_time(value)
    return f"{value:.1%}" if kind in SHARES else f"{value:,.6g}"


def figure_unit(name: str, top: float) -> tuple[float, str]:
    """Return the factor and unit of a figure on an axis that ends at *top*."""
    kind = name.partition(".")[0]
    if kind.endswith("_bytes_per_s"):
        return 1e-9, "GB/s"
    if kind.endswith("_bytes"):
        return 1e-9, "GB"
    if kind.endswith("_s") and not kind.endswith("per_s"):
        return time_unit(top)
    return (100.0, "%") if kind in SHARES else (1.0, "number")
