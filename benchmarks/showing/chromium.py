"""A real browser without a window, spoken to over a pipe (Chrome DevTools Protocol): pages, keys, pictures.

Decides nothing.  Needs a Chromium or Chrome on the path, and nothing else.

    Browser() --pipe--> chromium --headless      page = browser.page(width=390, dark=True); page.open(url)
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_S = 60.0
_ALIVE = "document.getElementById('live').textContent === 'live'"
LOADED = f"{_ALIVE} && document.querySelectorAll('#body tr').length > 0"
"""The dashboard shows a run."""

LOOKS = (Path(__file__).parent / "looks.js").read_text(encoding="utf-8")
"""What is wrong with a page's looks, as a list."""


def found() -> str | None:
    """The path of a browser; None: there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One process; a context manager."""

    def __init__(self) -> None:
        path = found()
        if path is None:
            raise FileNotFoundError(f"none of {', '.join(NAMES)} is on the path")
        self._profile = TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = [
            *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--mute-audio"),
            *(
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-pings",
            ),
            *("--hide-scrollbars", "--force-device-scale-factor=1", f"--user-data-dir={self._profile.name}"),
            *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # Chromium refuses a sandbox to root
        ]
        # The browser expects its pipe at the descriptors 3 and 4.
        shell = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, path, *flags],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        self._process.terminate()
        self._process.wait(ANSWER_S)
        self._listener.join(ANSWER_S)
        self._profile.cleanup()

    def page(
        self,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        mobile: bool = False,
        scale: float = 1,
    ) -> Page:
        """A new page in a context of its own: nothing is left of others' storage."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )
        page.theme(dark)
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Raises `RuntimeError` with the browser's words."""
        self._number += 1
        number, answer = self._number, queue.Queue[dict[str, Any]]()
        self._answers[number] = answer
        told = {"id": number, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._write, json.dumps(told).encode() + b"\0")
        try:
            said = answer.get(timeout=ANSWER_S)
        except queue.Empty:
            raise RuntimeError(f"{method}: the browser has not answered") from None
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        result: dict[str, Any] = said["result"]
        return result

    def _listen(self) -> None:
        left = b""
        with os.fdopen(self._read, "rb", buffering=0) as pipe:
            while block := pipe.read(1 << 20):
                *whole, left = (left + block).split(b"\0")
                for line in whole:
                    self._hear(json.loads(line))

    def _hear(self, said: dict[str, Any]) -> None:
        if "id" in said:
            self._answers.pop(said["id"]).put(said)
        elif (page := self._pages.get(said.get("sessionId", ""))) is not None:
            page.hear(said["method"], said["params"])


class Page:
    """One tab.

    Attributes:
        complaints: errors of scripts and of the console, and requests that failed.
        received_bytes: of all answers, as they came over the wire.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.received_bytes = 0
        self._loaded = threading.Event()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                told = details.get("exception", {}).get("description") or details["text"]
                self.complaints.append(f"{told} {details.get('url', '')}:{details['lineNumber']}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str([each.get("value") for each in params["args"]]))
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Network.loadingFinished":
                self.received_bytes += int(params["encodedDataLength"])

    def theme(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        """Returns when it is loaded."""
        self._loaded.clear()
        self.call("Page.navigate", url=url)
        if not self._loaded.wait(ANSWER_S):
            raise TimeoutError(f"{url} is not loaded within {ANSWER_S:.0f} s")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited.  Raises `RuntimeError`."""
        said = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in said:
            raise RuntimeError(f"{script[:200]}: {said['exceptionDetails']}")
        return said["result"].get("value")

    def until(self, script: str, within_s: float = ANSWER_S) -> Any:
        """Ask until the expression is true; returns its value.  Raises `TimeoutError`."""
        return until(lambda: self.run(script), script, within_s)

    def press(self, key: str, code: int, *, shift: bool = False, text: str = "") -> None:
        """One key, down and up, as from a keyboard."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page."""
        said = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole)
        )
        path.write_bytes(base64.b64decode(said["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


def until(ask: Callable[[], Any], what: str, within_s: float) -> Any:
    """Ask until the answer is true.  Raises `TimeoutError`."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if answer := ask():
            return answer
        time.sleep(0.05)  # between two looks, not instead of one
    raise TimeoutError(f"not within {within_s:.0f} s: {what}")
