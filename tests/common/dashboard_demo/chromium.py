"""A browser without a window, controlled over a pipe with the Chrome DevTools Protocol.

It needs a Chromium or Chrome on the path, and nothing else.

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
"""A condition in JavaScript: the dashboard shows a run."""

LAYOUT_CHECK = (Path(__file__).parent / "layout_check.js").read_text(encoding="utf-8")
"""JavaScript that returns the faults of a page's layout as a list of sentences."""


def found() -> str | None:
    """Return the path of a browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process; a context manager."""

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
        """Open a page in a new context, without the storage of other pages."""
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
        """Call a method of the protocol; return the result.  Raises `RuntimeError` if it fails."""
        self._number += 1
        number, answer = self._number, queue.Queue[dict[str, Any]]()
        self._answers[number] = answer
        request = {"id": number, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._write, json.dumps(request).encode() + b"\0")
        try:
            response = answer.get(timeout=ANSWER_S)
        except queue.Empty:
            raise RuntimeError(f"{method}: the browser did not answer within {ANSWER_S:.0f} s") from None
        if "error" in response:
            raise RuntimeError(f"{method}: {response['error']}")
        result: dict[str, Any] = response["result"]
        return result

    def _listen(self) -> None:
        rest = b""
        with os.fdopen(self._read, "rb", buffering=0) as pipe:
            while block := pipe.read(1 << 20):
                *messages, rest = (rest + block).split(b"\0")
                for message in messages:
                    self._receive(json.loads(message))

    def _receive(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers.pop(message["id"]).put(message)
        elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
            page.handle_event(message["method"], message["params"])


class Page:
    """One tab.

    Attributes:
        errors: errors of scripts and of the console, and requests that failed.
        requests: URLs of all requests.
        received_bytes: bytes of all responses on the wire.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.received_bytes = 0
        self._loaded = threading.Event()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def handle_event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                text = details.get("exception", {}).get("description") or details["text"]
                self.errors.append(f"{text} {details.get('url', '')}:{details['lineNumber']}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str([each.get("value") for each in params["args"]]))
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
        """Open a page and wait until it is loaded.  Raises `TimeoutError`."""
        self._loaded.clear()
        self.call("Page.navigate", url=url)
        if not self._loaded.wait(ANSWER_S):
            raise TimeoutError(f"{url} was not loaded within {ANSWER_S:.0f} s")

    def run(self, script: str) -> Any:
        """Evaluate an expression and return its awaited value.  Raises `RuntimeError`."""
        response = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in response:
            raise RuntimeError(f"{script[:200]}: {response['exceptionDetails']}")
        return response["result"].get("value")

    def until(self, script: str, within_s: float = ANSWER_S) -> Any:
        """Evaluate the expression until it is true; return its value.  Raises `TimeoutError`."""
        return until(lambda: self.run(script), script, within_s)

    def press(self, key: str, code: int, *, shift: bool = False, text: str = "") -> None:
        """Press and release a key."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page, or only of its visible part."""
        response = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole)
        )
        path.write_bytes(base64.b64decode(response["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


def until(condition: Callable[[], Any], what: str, within_s: float) -> Any:
    """Evaluate the condition until it is true; return its value.  Raises `TimeoutError`."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if value := condition():
            return value
        time.sleep(0.05)  # the interval of polling
    raise TimeoutError(f"not within {within_s:.0f} s: {what}")
