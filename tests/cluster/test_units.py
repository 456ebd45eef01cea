"""Quantities with units."""

from __future__ import annotations

import pytest

from distsim.errors import UsageError
from distsim.text.units import (
    format_bandwidth,
    format_bytes,
    format_time,
    parse_bandwidth,
    parse_flops,
    parse_memory,
    parse_size,
    parse_time,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400Gbps", 50e9),
        ("125MBps", 125e6),
        ("50GB/s", 50e9),
        ("1 Gb/s", 125e6),
        ("2GiBps", 2 * 2**30),
        ("8bps", 1.0),
        (3, 3.0),
    ],
)
def test_bandwidths_tell_bits_from_bytes(text: str | int, bytes_per_s: float) -> None:
    """A small b is a bit, a capital B a byte, prefixes are decimal unless they have an i."""
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize("text", ["fast", "400G", "-1Gbps", "0Gbps", "400 gigabit", True, None, "1e400GBps"])
def test_what_is_no_bandwidth_is_refused(text: object) -> None:
    """The message shows an example and what came."""
    with pytest.raises(UsageError, match=r"expected a bandwidth.*got"):
        parse_bandwidth(text)  # type: ignore[arg-type]


def test_times_have_the_usual_units() -> None:
    """From nanoseconds to seconds; a plain number is seconds; zero is a time."""
    assert [parse_time(t) for t in ("130ns", "5us", "5µs", "2ms", "1.5s", 0)] == [
        130e-9,
        5e-6,
        5e-6,
        2e-3,
        1.5,
        0,
    ]
    with pytest.raises(UsageError, match="expected a time"):
        parse_time("5 minutes")
    with pytest.raises(UsageError, match="zero or more"):
        parse_time(-1)
    with pytest.raises(UsageError, match="finite"):
        parse_time("1e999s")


def test_memory_is_decimal_or_binary_as_written() -> None:
    """80GB is not 80GiB."""
    assert (parse_memory("80GB"), parse_memory("80GiB"), parse_memory(7)) == (80 * 10**9, 80 * 2**30, 7)
    with pytest.raises(UsageError, match="expected a memory size"):
        parse_memory("80 Gb")


def test_rates_of_arithmetic() -> None:
    """Tera is 1e12."""
    assert parse_flops("989TFLOPS") == 989e12
    with pytest.raises(UsageError, match="expected a rate"):
        parse_flops("989T")


@pytest.mark.parametrize(
    ("text", "count"),
    [("8", 8), ("1K", 1024), ("64M", 64 << 20), ("8G", 8 << 30), ("1.5k", 1536), ("2MiB", 2 << 20), (12, 12)],
)
def test_sizes_mean_what_they_mean_to_nccl_tests(text: str | int, count: int) -> None:
    """K, M and G are powers of 1024, in either case."""
    assert parse_size(text) == count


def test_what_is_no_size_is_refused() -> None:
    """One line with examples."""
    with pytest.raises(UsageError, match=r"expected a size in bytes such as '8', '1K'.*got '8X'"):
        parse_size("8X")
    with pytest.raises(UsageError, match="below 8 EiB"):
        parse_size("1e99G")
    with pytest.raises(UsageError, match="expected a size"):
        parse_size("1e99999999G")


def test_figures_are_printed_short() -> None:
    """Three or four digits and the unit that suits."""
    assert format_bandwidth(370.8e9) == "370.8 GB/s"
    assert format_bandwidth(2.9375e9) == "2.94 GB/s"
    assert format_bandwidth(24.8e12) == "24.8 TB/s"
    assert format_bandwidth(98_800) == "98.8 kB/s"
    assert [format_time(t) for t in (0, 130e-9, 5e-6, 2e-3, 1.5)] == ["0", "130 ns", "5 us", "2 ms", "1.5 s"]
    assert [format_bytes(n) for n in (8, 64 << 20, 3 << 40)] == ["8 B", "64 MiB", "3 TiB"]
    assert [format_bytes(n) for n in (0, 0.2, 31.2, 1023, 1536)] == ["0 B", "<1 B", "31 B", "1023 B", "1.5 KiB"]
    assert [format_bytes(n) for n in (0.5, 0.9, 1, 1.5)] == ["<1 B", "<1 B", "1 B", "2 B"]
    near = [1023.4, 1023.6, 1023.4 * 1024, 1023.6 * 1024, (1 << 30) - 1, (1 << 40) - 1, -1023.6]
    assert [format_bytes(n) for n in near] == ["1023 B", "1 KiB", "1023 KiB", "1 MiB", "1 GiB", "1 TiB", "-1 KiB"]
