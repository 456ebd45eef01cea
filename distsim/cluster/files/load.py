"""`load_cluster`: from what a user types after --on to a Cluster."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from distsim.cluster.files.assemble import assemble
from distsim.cluster.graph.cluster import Cluster
from distsim.cluster.graph.host_template import HostTemplate
from distsim.errors import UsageError
from distsim.text.strangers import brief, load_toml, read_bytes

__all__ = ["MAX_NODES", "load_cluster", "merged", "preset_names", "preset_text", "read_text"]

LARGEST_FILE = 64 << 20
MAX_NODES = 32_768
"""More is a typing mistake rather than a cluster."""

LONGEST_NAME = 4096
_SUFFIXES = (".toml", ".xml", ".json", ".yml", ".yaml")


@functools.cache
def _presets() -> tuple[str, ...]:
    folder = resources.files("distsim.cluster") / "presets"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def preset_names() -> list[str]:
    """Names of the presets that come with distsim, in alphabetical order."""
    return list(_presets())


def preset_text(name: str) -> str:
    """The TOML file of a preset."""
    return (resources.files("distsim.cluster") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def load_cluster(name: str) -> Cluster:
    """A cluster from `preset[:nodes]` or a file: a cluster TOML, an NCCL topology XML, a networkx node-link
    JSON, or an ASTRA-sim network YAML; `file:nodes` sets the number of nodes of the first two. Raises
    UsageError.
    """
    stem, nodes = _split(name)
    path = Path(stem)
    file_like = path.suffix.lower() in _SUFFIXES or "/" in stem or _exists(path)
    if path.suffix == ".py":
        script = brief(str(path), 300)
        raise UsageError(
            f"expected a cluster (a preset or a .toml file), got the Python script {script}; the script comes last: "
            f"distsim run [--on CLUSTER] {script}"
        )
    if file_like and stem not in preset_names():
        return _load_file(path, nodes)
    if stem not in preset_names():
        raise UsageError(_unknown(stem))
    return _from_data(_preset_data(stem), nodes, f"preset {stem}")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """*base* with *over* laid on it, table by table; a table of another `kind` replaces the base's."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            same = value.get("kind", below.get("kind")) == below.get("kind")
            result[key] = merged(below, value) if same else value
        else:
            result[key] = value
    return result


def read_text(path: Path) -> str:
    """The text of a file a user named, or one clear line why not."""
    try:
        text = read_bytes(path, LARGEST_FILE).decode("utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"no such file: {brief(str(path), 300)} (expected a cluster file, or a preset: {_list()})"
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory: expected a cluster file") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x} at {error.start}"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {brief(str(path), 300)}: {error.strerror or error}") from None
    if not text.strip():
        raise UsageError(f"{path} is empty: expected a cluster file (distsim topo show dgx-h100 --toml prints one)")
    return text


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _split(name: str) -> tuple[str, int | None]:
    if not name.strip():
        raise UsageError(f"expected a cluster: a preset ({_list()}) or a TOML file, got an empty name")
    if len(name) > LONGEST_NAME or "\0" in name:
        raise UsageError(f"expected a cluster: a preset ({_list()}) or a file, got {brief(name)}")
    if _exists(Path(name)) or ":" not in name:
        return name, None
    stem, _, count = name.rpartition(":")
    try:
        nodes = int(count)
    except ValueError:
        raise UsageError(
            f"{brief(name)}: expected a number of nodes after ':', got {brief(count)!r} (as in {brief(stem)}:2)"
        ) from None
    if not stem:
        raise UsageError(f"expected a cluster before ':{brief(count)}': a preset ({_list()}) or a TOML file, got none")
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"{brief(name)}: expected 1 to {MAX_NODES} nodes, got {brief(nodes)}")
    return stem, nodes


def _load_file(path: Path, nodes: int | None) -> Cluster:
    text = read_text(path)
    match path.suffix.lower():
        case ".toml":
            return _from_data(_parse_toml(text, path), nodes, str(path))
        case ".xml":
            from distsim.cluster.files.nccl_xml import from_nccl_xml

            host, data = from_nccl_xml(text, str(path))
            return _from_data(data, nodes, str(path), host)
        case ".json" | ".yml" | ".yaml" if nodes is not None:
            raise UsageError(f"{path} says itself how many nodes there are: leave out ':{nodes}'")
        case ".json":
            from distsim.cluster.files.node_link import from_node_link

            return from_node_link(text, str(path), _usual)
        case ".yml" | ".yaml":
            from distsim.cluster.files.astra import from_astra

            return from_astra(text, str(path), _usual)
        case other:
            raise UsageError(f"{path}: expected a file ending in {', '.join(_SUFFIXES)}, got {other!r}")


def _usual() -> Cluster:
    from distsim.cluster.graph.any_graph import USUAL

    return load_cluster(USUAL)


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return load_toml(text)
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def _from_data(data: Mapping[str, Any], nodes: int | None, where: str, host: HostTemplate | None = None) -> Cluster:
    from distsim.cluster.files.spec import check_spec

    data = dict(data)
    if "base" in data:
        base = data.pop("base")
        if not isinstance(base, str) or base not in preset_names():
            raise UsageError(f"{where}: base: {_unknown(str(base))}")
        data = merged(_preset_data(base), data)
    if nodes is not None:
        unit = data.get("unit_nodes", 1)
        data["nodes"] = nodes * (unit if isinstance(unit, int) and 1 <= unit <= MAX_NODES else 1)
    spec = check_spec(data, where)
    return assemble(spec, host)


@functools.cache
def _preset_data(name: str) -> dict[str, Any]:
    """A preset's content, laid on that of the preset it names as its base; read once a process, changed by nobody."""
    data = tomllib.loads(preset_text(name))
    return merged(_preset_data(data.pop("base")), data) if "base" in data else data


def _list() -> str:
    return ", ".join(preset_names())


def _unknown(stem: str) -> str:
    said = stem.lower()[:80]
    near = difflib.get_close_matches(said, preset_names(), 1) or [
        name for name in preset_names() if name.startswith(said) or said in name.split("-")
    ]
    hint = f"; did you mean '{near[0]}'?" if near else ":"
    return f"unknown cluster '{brief(stem)}'{hint} expected a preset ({_list()}) or a TOML file"
