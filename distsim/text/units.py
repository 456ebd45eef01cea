"""Quantities with units: what cluster files and the command line accept, and how figures are printed.

Bandwidths and times are decimal (`400Gbps` is 4e11 bits a second); memory takes both (`80GB`, `80GiB`);
message sizes follow nccl-tests, where `K`, `M` and `G` are powers of 1024.
"""

from __future__ import annotations

import argparse
import math
import re
from decimal import Decimal

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SECOND_TEXTS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9", "min": "60"}
# Decimal, so that "5us" is the very float that 5e-6 is.
_SECONDS = {unit: Decimal(value) for unit, value in _SECOND_TEXTS.items()}
_SIZE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_NUMBER = r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|\.\d+)\s*"
_BANDWIDTH_RE = re.compile(_NUMBER + r"(Ki|Mi|Gi|Ti|[kKMGT]?)(b|B|bit|bits)(?:ps|/s)\s*")
_TIME_RE = re.compile(_NUMBER + r"(s|ms|us|µs|ns|min)\s*")
_MEMORY_RE = re.compile(_NUMBER + r"(Ki|Mi|Gi|Ti|[kKMGT]?)B\s*")
_FLOPS_RE = re.compile(_NUMBER + r"([kKMGTP]?)(?:FLOPS|FLOP/s|flops|flop/s)\s*")
_SIZE_RE = re.compile(_NUMBER + r"([kKmMgGtT]?)(?:i?[bB])?\s*")


def parse_bandwidth(text: str | int | float) -> float:
    """Return bytes a second of `"400Gbps"` (bits), `"125MBps"` or `"50GB/s"` (bytes), or a plain number (bytes)."""
    if isinstance(text, str):
        example = "a bandwidth such as '400Gbps' (bits) or '50GBps' (bytes)"
        number, prefix, unit = _match(_BANDWIDTH_RE, text, example).groups()
        value = Decimal(number) * (_DECIMAL.get(prefix) or _BINARY[prefix])
        return _positive(float(value if unit == "B" else value / 8), "a bandwidth", text)
    return _positive(_number(text, "a bandwidth such as '400Gbps'"), "a bandwidth", text)


def parse_time(text: str | int | float) -> float:
    """Return seconds of `"5us"`, `"130ns"`, `"2ms"`, `"1s"`, or of a plain number (seconds); zero is allowed."""
    if isinstance(text, str):
        match = _match(_TIME_RE, text, "a time such as '5us', '130ns' or '2ms'")
        return _finite(float(Decimal(match[1]) * _SECONDS[match[2]]), text)
    value = _number(text, "a time such as '5us'")
    if value < 0:
        raise UsageError(f"expected a time of zero or more, got {_shown(text)}")
    return _finite(value, text)


_LONG_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def seconds_of(text: str, flag: str = "--budget", example: str = "90s, 30m or 2h") -> float:
    """Return the seconds of a duration such as `90s`, `30m`, `2h`, `30d` or `6w`, the value of *flag*.

    Raises:
        UsageError: it is not one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w|)", text.strip())
    seconds = float(match[1]) * _LONG_UNITS[match[2]] if match is not None else 0.0
    if not 0.0 < seconds < 1e12:
        raise UsageError(f"{flag}: expected a duration such as {example}, got {text!r}")
    return seconds


def parse_memory(text: str | int | float) -> int:
    """Return bytes of `"80GiB"`, `"80GB"`, or of a plain number."""
    if isinstance(text, str):
        match = _match(_MEMORY_RE, text, "a memory size such as '80GiB' or '141GB'")
        value = float(Decimal(match[1]) * (_DECIMAL.get(match[2]) or _BINARY[match[2]]))
        return int(_positive(value, "a memory size", text))
    return int(_positive(_number(text, "a memory size such as '80GiB'"), "a memory size", text))


def parse_flops(text: str | int | float) -> float:
    """Return floating-point operations per second from text such as `"989TFLOPS"`, or from a plain number."""
    if isinstance(text, str):
        match = _match(_FLOPS_RE, text, "a rate such as '989TFLOPS'")
        return _positive(float(Decimal(match[1]) * _DECIMAL[match[2]]), "a rate", text)
    return _positive(_number(text, "a rate such as '989TFLOPS'"), "a rate", text)


def parse_size(text: str | int) -> int:
    """Return bytes of a message size as nccl-tests writes it: `"8"`, `"1K"`, `"64M"`, `"8G"` (powers of 1024)."""
    if isinstance(text, int):
        return text
    match = None if len(text) > 100 else _SIZE_RE.fullmatch(text)
    if match is None:
        raise UsageError(f"expected a size in bytes such as '8', '1K', '64M' or '8G', got {_shown(text)}")
    count = Decimal(match[1]) * _SIZE[match[2].upper()]
    if count >= 1 << 63:
        raise UsageError(f"expected a size below 8 EiB, got {_shown(text)}")
    return int(count)


def seconds(text: str) -> float:
    """Return the seconds of a flag or variable: `60`, `60s` or `1.5`. A wrong one is argparse's error."""
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= _LONGEST_WAIT_S:
        raise argparse.ArgumentTypeError(f"expected seconds, from 0 to {_LONGEST_WAIT_S:g}, got {_shown(text)}")
    return value


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth for people, in GB/s: `"370.8 GB/s"`."""
    if math.isinf(bytes_per_s):
        return "unlimited"
    gigabytes = bytes_per_s / 1e9
    if gigabytes >= 10_000:
        return f"{gigabytes / 1000:,.1f} TB/s"
    if 0 < gigabytes < 0.001:
        return f"{bytes_per_s / 1e3:.3g} kB/s"
    return f"{gigabytes:.1f} GB/s" if gigabytes >= 10 else f"{gigabytes:.3g} GB/s"


def format_time(seconds: float) -> str:
    """Return a time for people, in the unit that keeps it short: `"1.5 us"`."""
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}" if seconds else "0"
    return f"{seconds:,.0f} s" if seconds >= 1_000 else f"{seconds:.3g} s"


def format_bytes(count: float) -> str:
    """Return a number of bytes for people, in powers of 1024: `"64 MiB"`. A mean is of whole bytes, too."""
    if 0 < abs(count) < 1:
        return "<1 B"
    count = float(f"{count:.0f}")
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        text = f"{count:.4g}"
        if abs(float(text)) < 1024:
            return f"{text} {unit}"
        if abs(count) < 1024:  # what would be 1024 of these is one of the next
            count = float(text)
    return f"{count / 1024:.4g} TiB"


def count_of(text: str, flag: str, example: str) -> float:
    """Return the number that *text*, the value of *flag*, writes as `1T`, `300B`, `2.5M` or `1e12`.

    Raises:
        UsageError: it is not one.
    """
    word = text.strip()
    scale = _COUNTS.get(word[-1:].upper(), 1.0)
    try:
        count = float(word[:-1] if scale != 1.0 else word) * scale
    except ValueError:
        count = -1.0
    if not 0.0 < count < 1e30:
        raise UsageError(f"{flag}: expected a number such as {example}, got {text or 'none'}")
    return count


def format_count(count: float) -> str:
    """Return `1T`, `2.5M`, `312`: three digits, with a letter for thousands, millions, billions and trillions."""
    for letter, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * scale:
            return f"{count / scale:.3g}{letter}"
    return f"{count:.3g}"


_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def plural(number: int, noun: str) -> str:
    """Return `1 point` or `20 points`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _match(pattern: re.Pattern[str], text: str, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise UsageError(f"expected {expected}, got {_shown(text)}")
    return match


def _number(value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"expected {expected}, got {_shown(value)} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"expected {expected}, got {_shown(value)}") from None


def _shown(value: object) -> str:
    return repr(brief(value)) if isinstance(value, str) else brief(value)


_LEAST, _MOST = 1e-6, 1e24
"""Beyond these no machine is, and arithmetic with them overflows."""
_LONGEST_S = 1e15
_LONGEST_WAIT_S = 1e9
"""30 years; timeouts of more than 292 years overflow."""


def _positive(value: float, quantity: str, text: object) -> float:
    if not (0 < value < math.inf):
        raise UsageError(f"expected {quantity} above zero, got {_shown(text)}")
    if not _LEAST <= value <= _MOST:
        raise UsageError(f"expected {quantity} that a machine may have, got {_shown(text)}")
    return value


def _finite(value: float, text: object) -> float:
    if not math.isfinite(value):
        raise UsageError(f"expected a finite time, got {_shown(text)}")
    if value > _LONGEST_S:
        raise UsageError(f"expected a time below {_LONGEST_S:g} s, got {_shown(text)}")
    return value
