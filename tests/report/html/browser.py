"""A headless Chromium, led by its own protocol through a pipe: no driver, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE_S = 120.0


class Browser:
    """One page; *complaints* is what it said on its console, *requests* what it asked for beside itself."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        os.set_inheritable(theirs_in, True)
        os.set_inheritable(theirs_out, True)
        flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe --no-first-run"
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *flags.split(), f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._write = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._number = 0
        self._session = ""
        self._said = b""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._read.close()
        self._write.close()

    def ask(self, method: str, **params: Any) -> Any:
        """The answer to one command; what happens meanwhile is noted."""
        self._number += 1
        said: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            said["sessionId"] = self._session
        self._write.write(json.dumps(said).encode() + b"\0")
        self._write.flush()
        while True:
            message = self._message()
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._said:
            data = os.read(self._read.fileno(), 1 << 20)
            if not data:
                raise RuntimeError("the browser is gone")
            self._said += data
        text, _, self._said = self._said.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"])[:800])
            case "Runtime.consoleAPICalled":
                self.complaints.append(f"{params['type']}: {[a.get('value') for a in params['args']]}")
            case "Log.entryAdded":
                self.complaints.append(str(params["entry"]["text"]))
            case "Network.requestWillBeSent":
                self.requests.append(str(params["request"]["url"])[:200])
        return message

    def open(self, path: Path) -> None:
        """Load a file and wait until all of it is there."""
        self.ask("Page.navigate", url=path.resolve().as_uri())
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression on the page; of a promise, what it comes to."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"])[:800])
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"not true: {script}; {self.complaints}")
            time.sleep(0.05)

    def colours(self, scheme: str, media: str = "screen") -> None:
        """`light` or `dark`; *media* may be print."""
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=feature)

    def size(self, width: int, height: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def press(self, key: str) -> None:
        """A key, to whatever has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path) -> None:
        """A screenshot, for people."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))
