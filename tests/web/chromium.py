"""Debian's headless Chromium, controlled over two pipes by its own protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_SECONDS = 20.0
SHIM = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Tab:
    """A tab of a browser. `said` has its console's messages and violations of its rules."""

    def __init__(self, to: int, come: int) -> None:
        self._to, self._come = to, come
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.said: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._read(lambda each: each.get("id") == self._number)
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    def _read(self, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            while b"\0" in self._rest:
                line, self._rest = self._rest.split(b"\0", 1)
                message: dict[str, Any] = json.loads(line)
                if message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                    self.said.append(json.dumps(message["params"]))
                if wanted(message):
                    return message
            if not select.select([self._come], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._come, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more

    def go(self, address: str) -> None:
        self.said.clear()
        self.ask("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(AssertionError):  # between two pages there is none to ask
                if self.value(script):
                    return
            assert time.monotonic() < deadline, f"never: {script}"
            time.sleep(0.05)

    def click(self, script: str) -> None:
        """The result of a script, then the page that it leads to."""
        self.value("window.leaving = true")
        self.value(f"{script}.click()")
        self.until("!window.leaving && document.readyState === 'complete'")

    def looks(self, width: int, height: int = 900, scheme: str = "light") -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path | None = None) -> bytes:
        data = base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        if path:
            path.write_bytes(data)
        return data


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A browser with its own profile, which ends with the block."""
    assert PROGRAM
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = [
        PROGRAM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--remote-debugging-pipe",
    ]
    process = subprocess.Popen(
        # The browser reads its descriptor 3 and writes its descriptor 4.
        [sys.executable, "-c", SHIM, str(theirs_in), str(theirs_out), *command],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        tab = Tab(ours_out, ours_in)
        yield tab
        tab._session = None
        tab.ask("Browser.close")
        process.wait(timeout=30)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        if process.poll() is None:
            process.kill()
            process.wait()
