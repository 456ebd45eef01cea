"""Takes the screenshots in docs/pictures with a headless Chromium: `python -m tests.docs.pictures`."""

from __future__ import annotations

import argparse
import base64
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import DOCS, write_titled
from tests.house.tree import ROOT
from tests.report.html.browser import Browser

__all__ = ["FOLDER", "PICTURES", "SCHEMES", "Picture", "files"]

FOLDER = DOCS / "pictures"
SCHEMES = ("light", "dark")
WIDTH = 860
"""Width of the window in pixels, about that of the text on a page of the documentation."""
DRAWN = "[...document.querySelectorAll('.chart')].filter(c => c.offsetParent).every(c => c.dataset.drawn)"
SHOW_ONLY = """(selectors => {
    document.querySelectorAll("header, footer, .skip, .keys, .replay, .verdict details, .modebar-container")
        .forEach(element => element.remove());
    for (const element of document.querySelectorAll("article > *"))
        if (!selectors.some(selector => element.matches(selector))) element.remove();
    document.querySelector("main").style.padding = "4px 14px 14px";
    return document.querySelector("main").scrollHeight;
})(%s)"""
"""Removes all parts of a report but some, and what only a reader with a mouse needs; returns the height."""


@dataclass(frozen=True)
class Picture:
    """Some parts of the HTML report that a command of a page writes."""

    name: str
    page: str
    """Page whose titled blocks are the files of the command."""
    command: str
    parts: tuple[str, ...]
    """CSS selectors of the parts that the picture shows."""


_TRAINING = ("tutorials/first-simulation.md", "distsim run --on dgx-h100:1 --html run.html train.py")
PICTURES = (
    Picture("run", *_TRAINING, (".verdict", ".training")),
    Picture("timeline", *_TRAINING, ("#run-lanes",)),
    Picture("memory", *_TRAINING, ("#run-memory",)),
    Picture(
        "hang",
        "tutorials/first-diagnosis.md",
        "distsim run --on ethernet-cpu:2 --html hang.html train.py",
        (".verdict", "#run-lanes"),
    ),
    Picture(
        "wait-graph",
        "kinds.md",
        "distsim run --on ethernet-cpu:2 --html cycle.html scenarios/hangs/two_groups_crossed.py",
        ("#run-waits",),
    ),
)


def files(picture: Picture) -> Iterator[tuple[str, Path]]:
    """Return the light and the dark file of a picture."""
    return ((scheme, FOLDER / f"{picture.name}-{scheme}.png") for scheme in SCHEMES)


def take(browser: Browser, report: Path, picture: Picture) -> None:
    """Write both files of a picture."""
    for scheme, path in files(picture):
        browser.colours(scheme)
        browser.size(WIDTH, 4000)  # so high that every chart is in sight, and drawn
        browser.open(report)
        browser.until(DRAWN)
        clip = {"x": 0, "y": 0, "width": WIDTH, "scale": 1.25}
        clip["height"] = browser.run(SHOW_ONLY % json.dumps(picture.parts))
        shot = browser.ask("Page.captureScreenshot", format="png", clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    """Run each command once, and take all pictures of its report."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, Browser(Path(temporary) / "profile") as browser:
        for number, command in enumerate(dict.fromkeys(picture.command for picture in PICTURES)):
            chosen = [picture for picture in PICTURES if picture.command == command]
            folder = Path(temporary) / str(number)
            folder.mkdir()
            (folder / "scenarios").symlink_to(ROOT / "scenarios")
            write_titled(DOCS / chosen[0].page, folder)
            subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=folder, capture_output=True, check=False)
            for picture in chosen:
                take(browser, next(folder.glob("*.html")), picture)


if __name__ == "__main__":
    main()
