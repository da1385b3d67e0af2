"""A headless Chromium, driven over a pipe in its own protocol: no packages, no ports.

`find_chromium` says where one is. A `Browser` opens pages and tells what happened on them: messages
on the console, requests, sizes. Used by the tests that look at a page as a reader does.
"""

import base64
import contextlib
import itertools
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)
_PATIENCE_SECONDS = 90.0


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextlib.contextmanager
def opened_browser(profile: pathlib.Path) -> Iterator["Browser"]:
    """Start a Chromium with a profile of its own; it ends with the block."""
    program = find_chromium()
    assert program is not None
    # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    script = f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, program, *_ARGUMENTS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(command_read, answer_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(command_read)
    os.close(answer_write)
    try:
        yield Browser(command_write, answer_read)
    finally:
        os.close(command_write)
        os.close(answer_read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Browser:
    """Commands to a Chromium, and the events it sends."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._ids = itertools.count(1)
        self._rest = b""
        self._events: list[dict[str, Any]] = []

    def page(
        self,
        width_px: int,
        height_px: int = 900,
        *,
        has_script: bool = True,
        is_dark: bool = False,
    ) -> "Page":
        """Return an empty page of a size."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width_px,
            height=height_px,
            deviceScaleFactor=1,
            mobile=False,
        )
        page.call("Emulation.setScriptExecutionDisabled", value=not has_script)
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Run one command and return its result."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._commands, content) :]
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._events.append(answer)

    def wait_for(self, method: str, session: str) -> None:
        """Wait until an event was seen."""
        while not any(e.get("method") == method for e in self.events(session)):
            self._events.append(self._next())

    def events(self, session: str) -> list[dict[str, Any]]:
        """Events of a page so far."""
        return [event for event in self._events if event.get("sessionId") == session]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0, "Chromium does not answer"
            if select.select([self._answers], [], [], left)[0]:
                piece = os.read(self._answers, 1 << 20)
                assert piece, "Chromium ended"
                self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, path: pathlib.Path) -> None:
        """Open a file and wait until it is loaded."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._browser.wait_for("Page.loadEventFired", self._session)

    def value(self, expression: str) -> Any:
        """Return what an expression gives on the page (also where the page may run no script)."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move_pointer(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def complaints(self) -> list[str]:
        """Messages on the console, exceptions, and what the browser itself complains about."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        events = self._browser.events(self._session)
        return [json.dumps(e["params"]) for e in events if e["method"] in kinds]

    def requests(self) -> list[str]:
        """Addresses the page asked for; data written inside the page itself is none."""
        events = self._browser.events(self._session)
        urls = (
            e["params"]["request"]["url"]
            for e in events
            if e["method"] == "Network.requestWillBeSent"
        )
        return [url for url in urls if not url.startswith("data:")]

    def screenshot(self, path: pathlib.Path, *, is_whole: bool = True) -> None:
        """Save a picture of the page."""
        picture = self.call(
            "Page.captureScreenshot", captureBeyondViewport=is_whole, **self._clip(is_whole)
        )
        path.write_bytes(base64.b64decode(picture["data"]))

    def _clip(self, is_whole: bool) -> dict[str, Any]:
        if not is_whole:
            return {}
        box = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {**box, "scale": 1}}
