"""A checked cluster as TOML again: complete, with the schema's own explanations as comments."""

from __future__ import annotations

import json
from typing import Any

from distsim.cluster.files.spec import ClusterSpec
from distsim.cluster.files.table import Key, Table

__all__ = ["to_toml"]

_SCALES = {"GBps": 1e9, "us": 1e-6, "GB": 1e9, "TFLOPS": 1e12}


def to_toml(spec: ClusterSpec) -> str:
    """*spec* as text that reads back as the same cluster."""
    lines = ['# A cluster for distsim (--on FILE). `base = "dgx-h100"` and only what differs is enough, too.']
    _write(spec, "", lines)
    return "\n".join(lines) + "\n"


def _write(table: Table, path: str, lines: list[str]) -> None:
    below: list[tuple[str, Any]] = []
    for key, info in table.keys().items():
        value = getattr(table, key)
        if value is None:
            continue
        if isinstance(value, Table):
            below.append((key, value))
        elif isinstance(value, dict):
            below.extend([(key, (value, info))] if value else [])
        else:
            note = f"  # {info.text}" if info.text else ""
            lines.append(f"{key} = {_value(value, info)}{note}")
    for key, value in below:
        inner = f"{path}{key}"
        if isinstance(value, Table):
            about = (type(value).__doc__ or "").strip().partition("\n")[0]
            lines.extend(["", f"[{inner}]  # {about}"])
            _write(value, f"{inner}.", lines)
        else:
            entries, info = value
            unit = "TFLOPS" if key == "flops" else ""
            lines.extend(["", f"[{inner}]  # {info.text}"])
            lines.extend(f"{_key(name)} = {_entry(entry, unit)}" for name, entry in entries.items())


def _value(value: Any, info: Key) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _figure(value, info.unit)
    if isinstance(value, list):
        return f"[{', '.join(str(item) for item in value)}]"
    return json.dumps(str(value), ensure_ascii=False)


def _entry(value: Any, unit: str) -> str:
    if isinstance(value, Table):
        inside = [f"{key} = {_value(getattr(value, key), info)}" for key, info in value.keys().items()]
        return f"{{ {', '.join(inside)} }}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _figure(value, unit)


def _figure(value: float, unit: str) -> str:
    if not unit:
        return repr(value)
    return f'"{value / _SCALES[unit]:.12g}{unit}"'


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)
