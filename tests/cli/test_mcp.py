"""`distsim mcp`: what an agent may name, and what it is answered."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distsim.cli import main
from distsim.cli.agents.mcp import inside, server
from distsim.errors import UsageError
from tests.documents import checked

HANGS = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank():
    dist.all_reduce(torch.ones(4))
"""
READ_ONLY = ["attach", "diagnose", "schema", "topo"]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "link/x"])
def test_no_path_outside_the_root(name: str, tmp_path: Path) -> None:
    """Neither by dots, nor as an absolute path, nor through a link."""
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=f"expected a path below {root}, got '{name}'"):
        inside(root, name)
    assert inside(root, "a/b.py") == str(root / "a" / "b.py")


def test_a_wrong_root_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The folder that was asked for is named."""
    assert main(["mcp", "--root", "nothing"]) == 2
    assert capsys.readouterr().err == "distsim: error: --root nothing: expected a folder, got nothing there\n"


def test_without_the_sdk_one_line_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And how to get it."""
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp", "--root", str(tmp_path)]) == 2
    assert "pip install '.[mcp]' in a clone of distsim" in capsys.readouterr().err


def test_the_skill_names_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Each question in the table has a command that the parser knows."""
    from distsim.cli.dispatch import COMMANDS

    assert main(["mcp", "--skill"]) == 0
    text = capsys.readouterr().out
    commands = {line.split("`distsim ")[1].split()[0].strip("`") for line in text.splitlines() if "`distsim " in line}
    assert commands >= {"attach", "diagnose", "run", "fits", "tune", "buy"}
    assert commands <= COMMANDS.keys()


class _Sdk:
    """What stands in for the SDK's server: it keeps the tools that are declared."""

    def __init__(self, name: str, **_: Any) -> None:
        self.tools: dict[str, Any] = {}

    def tool(self, **_: Any) -> Any:
        def declare(function: Any) -> Any:
            self.tools[function.__name__] = function
            return function

        return declare


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the SDK that the server imports."""
    for name in ("mcp", "mcp.server"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in {
        "mcp.server.mcpserver": {"MCPServer": _Sdk},
        "mcp.server.mcpserver.exceptions": {"ToolError": RuntimeError},
        "mcp.types": {"ToolAnnotations": dict},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("sdk")
@pytest.mark.parametrize(
    ("allow_run", "more"), [(False, []), (True, ["fits", "run", "scenario", "tune"])], ids=["read only", "allowed"]
)
def test_tools_that_execute_a_script_are_there_if_allowed(allow_run: bool, more: list[str], tmp_path: Path) -> None:
    """By default an agent can read alone."""
    assert sorted(server(tmp_path, allow_run).tools) == sorted([*READ_ONLY, *more])


@pytest.mark.usefixtures("sdk")
@pytest.mark.parametrize(
    ("tool", "words", "expected"),
    [
        ("diagnose", {"directory": ".."}, "expected a path below"),
        ("run", {"script": "/etc/passwd"}, "expected a path below"),
        ("run", {"script": "x.py", "on": "nccl"}, "expected a cluster to simulate"),
        ("run", {"script": "x.py", "on": "../c.toml"}, "expected a path below"),
        ("schema", {"name": "x"}, "expected one of report"),
    ],
)
def test_a_tool_refuses_in_one_line(tool: str, words: dict[str, str], expected: str, tmp_path: Path) -> None:
    """The client gets the sentence, and no traceback."""
    with pytest.raises(RuntimeError, match=expected) as refused:
        asyncio.run(server(tmp_path, True).tools[tool](**words))
    assert "\n" not in str(refused.value)


def _called(root: Path, allow_run: bool, calls: list[tuple[str, dict[str, Any]]]) -> tuple[list[str], list[Any]]:
    """The tools that a client sees, and its answers."""
    client = pytest.importorskip("mcp.client", reason="the extra 'mcp' is not installed")

    async def talk() -> tuple[list[str], list[Any]]:
        async with client.Client(server(root, allow_run)) as one:
            tools = (await one.list_tools()).tools
            return sorted(tool.name for tool in tools), [await one.call_tool(name, words) for name, words in calls]

    return asyncio.run(talk())


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
def test_a_client_is_answered_by_reports(tmp_path: Path) -> None:
    """A real client sees the tools, and gets typed reports or one line."""
    (tmp_path / "hangs.py").write_text(HANGS)
    tools, answers = _called(
        tmp_path,
        True,
        [
            ("run", {"script": "hangs.py"}),
            ("topo", {"cluster": "dgx-h100:2"}),
            ("run", {"script": "../hangs.py"}),
            ("run", {"script": "hangs.py", "on": "gloo"}),
        ],
    )
    assert tools == sorted([*READ_ONLY, "fits", "run", "scenario", "tune"])
    report, cluster, outside, real = answers
    assert checked(report.structured_content)["diagnoses"][0]["culprits"] == [0]
    assert checked(cluster.structured_content)["world_size"] == 16
    assert (outside.is_error, real.is_error) == (True, True)
    assert "expected a path below" in outside.content[0].text
    assert "expected a cluster to simulate, such as dgx-h100:4, got 'gloo'" in real.content[0].text


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
def test_nothing_runs_unless_it_is_allowed(tmp_path: Path) -> None:
    """By default no tool executes a script."""
    tools, (answer,) = _called(tmp_path, False, [("diagnose", {"directory": "none"})])
    assert tools == READ_ONLY
    assert answer.is_error
    assert "no such folder" in answer.content[0].text
