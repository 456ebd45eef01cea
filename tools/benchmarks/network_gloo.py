"""gloo on this machine against the simulator, in one run: calibrated on sizes that are powers of 4, predicted
on the powers of 2 between. Over loopback, and (as root, with ip and tc) between two network namespaces with a
shaped link.

Peer: gloo itself. Aim: a median error within 20 %. Prints, asserts nothing.

    python -m tools.benchmarks.network_gloo [SECONDS] [RATE]

By default 20 s and 1gbit.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess

from distsim.calibration.live import check_gloo, cluster_toml, fit_gloo, measure_gloo
from tools.benchmarks.arguments import Arguments, amount

FOURS = [4**power for power in range(3, 13)]
BETWEEN = [2 * size for size in FOURS[:-1]]
NAMES = ("distsim-a", "distsim-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def loopback(seconds: float) -> None:
    """Two processes on one host."""
    rows = measure_gloo(2, sorted(FOURS + BETWEEN), seconds=seconds)
    constants = fit_gloo([row for row in rows if row.size_bytes in FOURS], 2)
    text = cluster_toml(constants, name="gloo-here", nodes=1, ranks_per_node=2, note="loopback")
    print("gloo over loopback, 2 ranks (target: median within 20 %)")
    print(check_gloo(text, [row for row in rows if row.size_bytes in BETWEEN], 1, 2))


def shaped(seconds: float, rate: str) -> None:
    """One process in each of two namespaces, joined by a link of that rate."""
    try:
        _build(rate)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no shaped namespaces here: {error}")
        return
    try:
        prefixes = [["ip", "netns", "exec", name] for name in NAMES]
        sizes = [size for size in sorted(FOURS + BETWEEN) if size <= 4**11]
        rows = measure_gloo(2, sizes, seconds=seconds, prefixes=prefixes, address=ADDRESSES[0], interface="wire")
        constants = fit_gloo([row for row in rows if row.size_bytes in FOURS], 2)
        text = cluster_toml(constants, name="gloo-shaped", nodes=2, ranks_per_node=1, note=f"namespaces, {rate}")
        print(f"gloo between two network namespaces, {rate} (target: median within 20 %)")
        print(check_gloo(text, [row for row in rows if row.size_bytes in BETWEEN], 2, 1))
    finally:
        _remove()


def _build(rate: str) -> None:
    _remove()
    for name in NAMES:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", NAMES[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire")
        _run("ip", "-n", name, "link", "set", "wire", "up")
        _run(
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            "wire",
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            "256k",
            "latency",
            "100ms",
        )


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def link_rate(text: str) -> str:
    """As tc takes it."""
    if not re.fullmatch(r"[1-9]\d*[kmg]?bit", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"expected a rate as 100mbit or 1gbit, got {text!r}")
    return text


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("seconds", nargs="?", metavar="SECONDS", type=amount, default=20.0)
    parser.add_argument("rate", nargs="?", metavar="RATE", type=link_rate, default="1gbit")
    args = parser.parse_args()
    loopback(args.seconds)
    if os.geteuid() == 0:
        shaped(args.seconds, args.rate)
    else:
        print("shaped namespaces need root")


if __name__ == "__main__":
    main()
