"""What of NCCL's environment a cluster's file sets that changes its choices or its pieces (`nccl.settings`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

__all__ = ["Settings", "host_copy_bytes"]

_BUFFER = 1 << 22
_STEPS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """NCCL_ALGO, NCCL_PROTO, NCCL_NVLS_ENABLE and NCCL_BUFFSIZE; NCCL's defaults where they are not set."""

    algos: frozenset[str] | None
    protos: frozenset[str] | None
    """None: all that there are."""
    nvls: bool
    slot_bytes: int
    """Of a channel's eight slots in Simple."""

    @staticmethod
    def of(environment: Mapping[str, str], algos: tuple[str, ...], protos: tuple[str, ...]) -> Settings:
        """Read *environment*; *algos* and *protos* are those that NCCL has."""
        buffer = environment.get("NCCL_BUFFSIZE", str(_BUFFER))
        if not buffer.isdigit() or int(buffer) < _STEPS:
            raise UsageError(f"nccl.settings.NCCL_BUFFSIZE: expected bytes of a buffer, got {brief(buffer)!r}")
        return Settings(
            _listed("NCCL_ALGO", environment, algos),
            _listed("NCCL_PROTO", environment, protos),
            environment.get("NCCL_NVLS_ENABLE", "1") != "0",
            int(buffer) // _STEPS,
        )

    def against(self, algo: str, proto: str) -> str:
        """Which setting rules a choice out; empty where none does."""
        if self.algos is not None and algo not in self.algos:
            return f"NCCL_ALGO leaves {algo} out"
        return f"NCCL_PROTO leaves {proto} out" if self.protos is not None and proto not in self.protos else ""


def host_copy_bytes(environment: Mapping[str, str]) -> int | None:
    """Up to how many bytes CXI's provider itself copies what it matched into a GPU's memory; longer ones it has CUDA
    copy (libfabric, prov/cxi: FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD). None where nothing is set: 4,096."""
    name = "FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD"
    given = environment.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit()) or len(given) > 15:
        raise UsageError(f"nccl.settings.{name}: expected bytes, got {brief(given)!r}")
    return int(given)


def _listed(name: str, environment: Mapping[str, str], known: tuple[str, ...]) -> frozenset[str] | None:
    """A list as NCCL reads it: names after commas, all others where a ^ stands before them."""
    given = environment.get(name, "")
    if not given:
        return None
    by_name = {one.lower(): one for one in known}
    words = given.removeprefix("^").lower().split(",")
    if unknown := [word for word in words if word not in by_name]:
        raise UsageError(
            f"nccl.settings.{name}: expected names of {', '.join(known)}, after commas (^ before them: all others), "
            f"got {brief(unknown[0])!r}"
        )
    found = {by_name[word] for word in words}
    return frozenset(set(known) - found if given.startswith("^") else found)
