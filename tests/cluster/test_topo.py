"""`distsim topo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distsim.cli import main
from distsim.cluster import load_cluster, preset_names
from distsim.cluster.plot import plot
from tests.documents import checked
from tests.golden import assert_golden
from tests.report.html.browser import CHROMIUM

GOLDEN = Path(__file__).parent / "golden"


def _printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["topo", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_fits_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every preset, no colour in a pipe, no line over the width; the sources where there is room."""
    monkeypatch.setenv("COLUMNS", str(width))
    text = _printed(capsys, "list")
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(any(line.startswith(f"{name} ") for line in text.splitlines()) for name in preset_names())
    assert ("source" in text) == (width == 120)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["dgx-h100:4", "ethernet-cpu:2", "gb200-nvl72:2"])
def test_a_cluster_as_text(
    name: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summary, links, one node, what is between the nodes."""
    monkeypatch.setenv("COLUMNS", str(width))
    text = _printed(capsys, "show", name)
    assert max(map(len, text.splitlines())) <= width
    lines = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    assert_golden(GOLDEN / f"show_{name.replace(':', '_')}_{width}.txt", lines)


def test_the_software_and_what_else_it_could_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was assumed, by which variant's name, the other variants, and what was measured."""
    monkeypatch.setenv("COLUMNS", "120")
    text = _printed(capsys, "show", "polaris:setup5:2")
    assert "FI_CXI_RX_MATCH_MODE=software" in text
    assert "(setup5)" in text
    assert "or polaris:setup1: no plugin: TCP sockets" in text
    assert "or polaris:setup5" not in text
    assert "measured: all_reduce, all_gather and alltoall on 2, 8 and 256 nodes" in text
    assert "or polaris" not in _printed(capsys, "show", "dgx-h100")


def test_many_routers_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A torus of 64 does not fill the screen."""
    path = tmp_path / "torus.toml"
    path.write_text('base = "dgx-h100"\nnodes = 64\n[fabric]\nkind = "torus"\ndims = [4, 4, 4]\n')
    assert "router0-63: n0-63 (a node each)" in _printed(capsys, "show", str(path))


def test_a_cluster_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures for programs, with their units in the names."""
    data = checked(_printed(capsys, "show", "dgx-h100:4", "--json"))
    assert (data["schema"], data["num_nodes"], data["world_size"]) == ("distsim.topo/1", 4, 32)
    assert data["bisection_bandwidth_bytes_per_s"] == pytest.approx(2 * 8 * 48.5e9)
    assert sum(entry["count"] for entry in data["link_kinds"]) == data["num_links"]
    assert data["node"]["gpu"]["flops_per_s"]["bf16"] == 989.4e12


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One entry a preset."""
    data = json.loads(_printed(capsys, "list", "--json"))
    assert [entry["name"] for entry in data["clusters"]] == preset_names()


def test_a_cluster_as_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """GraphML and node-link JSON are written, TOML printed; each reads back."""
    graphml, linked = tmp_path / "c.graphml", tmp_path / "c.json"
    text = _printed(capsys, "show", "dgx-h100:2", "--toml", "--graphml", str(graphml), "--node-link", str(linked))
    toml = tmp_path / "c.toml"
    toml.write_text(text)
    links = load_cluster("dgx-h100:2").links
    assert load_cluster(str(toml)).links == links
    assert load_cluster(str(linked)).links == links
    assert graphml.read_text().startswith("<?xml")


def test_a_file_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """For every kind of file, before any other is written."""
    there = tmp_path / "there.xml"
    for flag in ("--graphml", "--node-link", "--plot"):
        argv = ["topo", "show", "dgx-h100", "--graphml", str(there)] if flag != "--graphml" else ["topo", "show", "x"]
        assert main([*argv, flag, str(tmp_path / "no" / "x.svg")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"distsim: error: {flag} ")
        assert "no; create it first" in error
        assert error.count("\n") == 1
        assert not there.exists()


@pytest.mark.parametrize(
    ("name", "there", "not_there"),
    [
        ("dgx-h100:2", ["n1/gpu7", "nvlink: 370.8 GB/s each way (16 links)", "gpu (16)"], ["like n0"]),
        ("dgx-h100:16", ["n0/gpu7", "n1-n15, like n0", "other nodes (15)", "(128 links)"], ["n1/gpu7"]),
        ("gb200-nvl72:1", ["leaf0"], ["fabric: 0"]),
    ],
)
def test_a_picture(name: str, there: list[str], not_there: list[str]) -> None:
    """The first node is drawn whole and many others, which are like it, as one point; links have speeds."""
    drawn = json.dumps(plot(load_cluster(name)))
    assert [text for text in there if text not in drawn] == []
    assert [text for text in not_there if text in drawn] == []


def test_a_picture_is_a_page_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With plotly's script in it."""
    path = tmp_path / "c.html"
    assert main(["topo", "show", "dgx-h100:2", "--plot", str(path)]) == 0
    assert capsys.readouterr().err == f"wrote {path}\n"
    page = path.read_text()
    assert "dgx-h100: 2 nodes, 16 ranks" in page
    assert 'src="http' not in page


def test_a_picture_of_no_known_kind_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The ending chooses the format."""
    assert main(["topo", "show", "dgx-h100", "--plot", str(tmp_path / "c.xyz")]) == 2
    assert "expected a file ending in .html, .jpeg" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "name"), [("plotly", "c.html"), ("kaleido", "c.png"), ("kaleido", "c")])
def test_without_its_packages_a_picture_says_what_to_install(
    package: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The extra is named."""
    monkeypatch.setattr("distsim.text.output_files.find_spec", lambda found: None if found == package else found)
    assert main(["topo", "show", "dgx-h100", "--plot", str(tmp_path / name)]) == 2
    assert (
        f"--plot: {package} is not installed; pip install -e '.[plot]' in a clone of distsim" in capsys.readouterr().err
    )


def test_a_still_picture_without_a_chrome_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says which kind takes none."""

    def fails(*args: Any, **kwargs: Any) -> bytes:
        raise RuntimeError("Kaleido requires Google Chrome\nto be installed.")

    monkeypatch.setattr("distsim.text.output_files.find_spec", lambda name: name)
    monkeypatch.setattr("plotly.io.to_image", fails)
    assert main(["topo", "show", "dgx-h100", "--plot", str(tmp_path / "c.svg")]) == 2
    told = capsys.readouterr().err
    assert "Kaleido requires Google Chrome to be installed." in told
    assert "write a .html instead" in told
    assert told.count("\n") == 1


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(("kind", "begin"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_still_picture_is_drawn_by_a_chrome(kind: str, begin: bytes, tmp_path: Path) -> None:
    """By plotly's own export."""
    pytest.importorskip("kaleido")
    assert main(["topo", "show", "dgx-h100", "--plot", str(tmp_path / f"c.{kind}")]) == 0
    assert (tmp_path / f"c.{kind}").read_bytes().startswith(begin)


def test_a_wrong_cluster_is_a_mistake_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line."""
    assert main(["topo", "show", "dgx-h10:2"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'dgx-h100'?" in error
    assert error.count("\n") == 1
