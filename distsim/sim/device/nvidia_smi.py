"""`nvidia-smi` of a simulated node: its table, `-L`, `-q`, `topo -m` and `--query-gpu`, in a process without torch.

The rank that starts it describes its GPUs in DISTSIM_GPUS. Sensors that the simulation does not have are [N/A].
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

DRIVER_VERSION = "570.124.06"
_UNITS = {"memory": "MiB", "utilization": "%", "power": "W", "clocks": "MHz"}
_SENSORS = ("power", "clocks", "temperature", "fan", "pstate", "serial", "vbios_version", "display")
_REMEDY = "-L, -q, topo -m, --query-gpu=utilization.gpu,memory.used --format=csv, or no flag"
_LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
_BAR = "+-----------------------------------------+------------------------+----------------------+"
_WIDTH = len(_BAR) - 2


def main(words: Sequence[str], described: str) -> int:
    """Print what `nvidia-smi *words*` prints of the GPUs in *described*, and return its exit code."""
    node = json.loads(described)
    if words and words[0] == "topo" and {*words[1:]} in ({"-m"}, {"--matrix"}):
        print(_matrix(node))
        return 0
    flags, chosen = _flags(words), list(node["gpus"])
    for name in flags.keys() & {"-i", "--id"}:
        chosen = [gpu for gpu in chosen if str(gpu["index"]) in flags[name].split(",") or gpu["uuid"] in flags[name]]
    listing = {"-q", "--query", "-d", "--display"}
    known = {"-i", "--id", "-L", "--list-gpus", "--query-gpu", "--query-compute-apps", "--format"} | listing
    if flags.keys() - known:
        print(f"distsim: nvidia-smi {' '.join(words)} is not simulated: use {_REMEDY}", file=sys.stderr)
        return 2
    if flags.keys() & listing:
        print(_listing(chosen, node))
        return 0
    if flags.keys() & {"-L", "--list-gpus"}:
        print("\n".join(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})" for gpu in chosen))
        return 0
    how = flags.get("--format", "").replace(" ", "").split(",")
    if "--query-compute-apps" in flags:
        if "noheader" not in how:
            print(flags["--query-compute-apps"].replace(",", ", "))
        return 0
    if "--query-gpu" in flags:
        return _query([name.strip() for name in flags["--query-gpu"].split(",")], how, chosen, node)
    print(_table(chosen, node))
    return 0


def _flags(words: Sequence[str]) -> dict[str, str]:
    result: dict[str, str] = {}
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        takes = name in ("-i", "--id", "--query-gpu", "--query-compute-apps", "--format", "-d", "--display")
        result[name] = left.pop(0) if takes and not equals and left else value
    return result


def _query(names: Sequence[str], how: Sequence[str], gpus: Sequence[dict[str, Any]], node: dict[str, Any]) -> int:
    if "csv" not in how:
        print('"--format=" switch is missing. Please specify one.', file=sys.stderr)
        return 2
    columns = []
    for name in names:
        values = [_value(name, gpu, node) for gpu in gpus]
        if None in values:
            print(f'Field "{name}" is not a valid field to query.', file=sys.stderr)
            return 2
        unit = _UNITS.get(name.partition(".")[0], "")
        title = f"{name} [{unit}]" if unit else name
        has_unit = unit and "nounits" not in how
        columns.append([title, *(f"{v} {unit}" if has_unit and v != "[N/A]" else str(v) for v in values)])
    lines = [", ".join(line) for line in zip(*columns, strict=True)]
    print("\n".join(lines[1:] if "noheader" in how else lines))
    return 0


def _value(name: str, gpu: dict[str, Any], node: dict[str, Any]) -> Any:
    """Return the value of one field; None if nvidia-smi does not define it."""
    known = {
        "timestamp": node["now"],
        "driver_version": DRIVER_VERSION,
        "count": len(node["gpus"]),
        "index": gpu["index"],
        "name": gpu["name"],
        "gpu_name": gpu["name"],
        "uuid": gpu["uuid"],
        "gpu_uuid": gpu["uuid"],
        "pci.bus_id": gpu["bus_id"],
        "gpu_bus_id": gpu["bus_id"],
        "compute_cap": gpu["compute_cap"],
        "compute_mode": "Default",
        "persistence_mode": "Enabled",
        "mig.mode.current": "Disabled",
        "memory.total": gpu["total_mib"],
        "memory.used": gpu["used_mib"],
        "memory.free": gpu["total_mib"] - gpu["used_mib"],
        "memory.reserved": 0,
        "utilization.gpu": gpu["utilization"],
        "utilization.memory": "[N/A]",
    }
    return known.get(name, "[N/A]" if name.startswith(_SENSORS) else None)


def _matrix(node: dict[str, Any]) -> str:
    """Return the connections of GPUs and NICs, with the cores of each socket; a core has two threads."""
    rows, cores = node["connections"], node["cores"]
    titles = [title for title, _, _ in rows]
    sockets = 1 + max(socket for _, _, socket in rows)
    lines = ["\t".join(["", *titles, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for title, ways, socket in rows:
        first, threads = socket * cores, (sockets + socket) * cores
        near = [f"{first}-{first + cores - 1},{threads}-{threads + cores - 1}", str(socket), "", "N/A"]
        ways = [" X " if way == "X" else way for way in ways]
        lines.append("\t".join([title, *ways, *(near if title.startswith("GPU") else [])]))
    return "\n".join(lines) + "\n" + _LEGEND


def _listing(gpus: Sequence[dict[str, Any]], node: dict[str, Any]) -> str:
    """Return what `-q` shows of what is simulated."""
    lines = ["", "==============NVSMI LOG==============", ""]

    def add(depth: int, name: str, value: Any = None) -> None:
        title = "    " * depth + name
        lines.append(title if value is None else f"{title:<51}: {value}")

    add(0, "Timestamp", node["now"])
    add(0, "Driver Version", DRIVER_VERSION)
    add(0, "CUDA Version", node["cuda"])
    lines.append("")
    add(0, "Attached GPUs", len(node["gpus"]))
    for gpu in gpus:
        add(0, f"GPU {gpu['bus_id']}")
        for name, field in (("Product Name", "name"), ("GPU UUID", "uuid")):
            add(1, name, gpu[field])
        add(1, "Persistence Mode", "Enabled")
        add(1, "MIG Mode")
        add(2, "Current", "Disabled")
        add(1, "FB Memory Usage")
        free_mib = gpu["total_mib"] - gpu["used_mib"]
        for name, mib in (("Total", gpu["total_mib"]), ("Reserved", 0), ("Used", gpu["used_mib"]), ("Free", free_mib)):
            add(2, name, f"{mib} MiB")
        add(1, "Compute Mode", "Default")
        add(1, "Utilization")
        add(2, "GPU", f"{gpu['utilization']} %")
        lines.append("")
    return "\n".join(lines)


def _table(gpus: Sequence[dict[str, Any]], node: dict[str, Any]) -> str:
    head = f"| NVIDIA-SMI {DRIVER_VERSION:<22} Driver Version: {DRIVER_VERSION:<14} CUDA Version: {node['cuda']:<8} |"
    lines = [
        node["now"],
        f"+{'-' * _WIDTH}+",
        head,
        _BAR.replace("+", "|", 1),
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        "|                                         |                        |               MIG M. |",
        "|=========================================+========================+======================|",
    ]
    for gpu in gpus:
        memory = f"{gpu['used_mib']}MiB / {gpu['total_mib']:>6}MiB"
        lines += [
            f"| {gpu['index']:>3}  {gpu['name'][:28]:<28}   On  |   {gpu['bus_id']} Off |                    0 |",
            f"| N/A   N/A    P0             N/A /   N/A | {memory:>22} | {gpu['utilization']:>6}%      Default |",
            "|                                         |                        |             Disabled |",
            _BAR,
        ]
    apps = ["Processes:", " GPU   GI   CI              PID   Type   Process name                        GPU Memory"]
    lines += ["", f"+{'-' * _WIDTH}+", *(f"| {line:<{_WIDTH - 2}} |" for line in apps), f"|{'=' * _WIDTH}|"]
    lines += [f"| {'  No running processes found':<{_WIDTH - 2}} |", f"+{'-' * _WIDTH}+"]
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `nvidia-smi | head` ends as the real one does
    sys.exit(main(sys.argv[1:], os.environ["DISTSIM_GPUS"]))
