"""An HTTP server that serves the files of a folder, with the fault that the first part of a path names.

    python faulty_http_server.py FOLDER     prints its port, then a line for each request: PATH RANGE

/plain/NAME supports ranges.  `Handler.do_GET` lists the faults.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

PIECE = 100


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = Path()
    served: ClassVar[dict[str, int]] = {}  # requests by path

    def do_GET(self) -> None:
        _, fault, name = self.path.split("/", 2)
        asked = self.headers.get("Range", "")
        print(self.path, asked or "-", flush=True)
        number = self.served[self.path] = self.served.get(self.path, -1) + 1
        targets = {"moved": f"/plain/{name}", "loop": self.path, "moved-to": unquote(name)}
        if fault in (*targets, "unprintable"):
            self.send_response(*((302,) if fault in targets else (410, f"\x1b[2J{1000 * '-'}")))
            self.send_header("Location", targets.get(fault, ""))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path = self.folder / (name.partition("?")[0] if fault == "signed" else name)
        if not path.is_file():
            self.send_error(404)
            return
        body, start = path.read_bytes(), 0
        if fault == "other":
            body = body[::-1]
        elif fault == "login" and number == 0:
            body = b"<html>Log in to this network</html>"
        elif fault in ("chunked", "breaks-short", "unsized-short"):
            body = body[: len(body) // 2]
        if asked and fault not in ("no-ranges", "deaf", "unsized-short"):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            shown = start + 1 if fault == "wrong-range" else start
            self.send_header("Content-Range", f"bytes {shown}-{len(body) - 1}/{len(body)}")
        elif fault == "busy" and number == 0:
            self.send_response(503)
            self.send_header("Retry-After", "7")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        else:
            self.send_response(200)
        rest = body[start:]
        declared = {"says-less": len(rest) // 2, "says-more": len(rest) + 7}.get(fault, len(rest))
        if fault in ("endless", "unsized", "unsized-short"):
            self.send_header("Connection", "close")
        elif fault == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            rest = b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest)
            declared = len(rest)
        else:
            self.send_header("Content-Length", str(declared))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._send(fault, number, rest, declared)
        self.close_connection = True

    def _send(self, fault: str, number: int, rest: bytes, declared: int) -> None:
        breaks = {"breaks": 2, "no-ranges": 2, "unsized": 2, "breaks-short": 1}
        if number < breaks.get(fault, 0):
            rest = rest[:PIECE]  # and close the connection
        elif fault in ("often", "deaf", "wrong-range"):
            rest = rest[:PIECE]
        elif fault == "stalls":
            self.wfile.write(rest[:PIECE])
            threading.Event().wait(60.0)  # the client gives up earlier
            return
        elif fault == "trickles":
            for at in range(len(rest)):
                self.wfile.write(rest[at : at + 1])
                threading.Event().wait(0.02)
            return
        while fault == "endless":
            self.wfile.write(rest)
        self.wfile.write(rest[:declared])

    def log_message(self, *_: object) -> None: ...


class Server:
    """This program as a process.

    Attributes:
        url: the URL before the name of a fault.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def stop(self) -> list[tuple[str, str]]:
        """End the process; return the requested paths and ranges."""
        self._process.kill()
        out, _ = self._process.communicate(timeout=60.0)
        return [(path, asked) for path, asked in map(str.split, out.splitlines())]


def main() -> None:
    Handler.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
