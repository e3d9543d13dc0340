"""Checkpoints on a real S3 server (moto's), over a connection that a test can stop."""

from __future__ import annotations

import copy
import os
import queue
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpointed_group import WITHIN_S, run, wait_for_uploads
from torch import nn

import gridtrain
from gridtrain.errors import ConfigError
from gridtrain.training.checkpoint.remote_store import RemoteStore

pytest.importorskip("moto.server", reason="install moto[server] to run a server that speaks S3")
s3fs = pytest.importorskip("s3fs", reason="install s3fs to use s3:// URLs")

pytestmark = [pytest.mark.integration, pytest.mark.executed]

URL = "s3://checkpoints/run"
DATA = [(torch.full((512,), i / 24), torch.tensor([2.0 * i])) for i in range(24)]

torch.manual_seed(7)
NET = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 1))  # 4 MB, and 4 MB of momentum


def train(grid: gridtrain.Grid) -> tuple[list[int], torch.Tensor]:
    model = copy.deepcopy(NET)
    inner = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    optimizer = grid.optimizer(inner, model, exchange=gridtrain.Dense())
    seen = []
    for x, y in grid.batches(DATA, global_batch_size=6, steps=9):
        seen.append(grid.step)
        wait_for_uploads(grid)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, model[1].weight.detach().clone()


class Connection(socketserver.BaseRequestHandler):
    """Forwards what a client sends, until it has sent that part of an object at which the proxy stops."""

    server: Proxy

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as beyond:
            answers = threading.Thread(target=self._forward, args=(beyond, self.request), daemon=True)
            answers.start()
            sent, stops = 0, False
            while data := self._receive(self.request):
                stops = stops or (self.server.stops_at is not None and self.server.stops_at in data)
                sent += len(data)
                if stops and sent > 1 << 20:
                    self.server.stopped.set()
                    self.server.goes_on.wait(WITHIN_S)
                    return
                beyond.sendall(data)
            beyond.shutdown(socket.SHUT_WR)
            answers.join(WITHIN_S)

    def _forward(self, source: socket.socket, to: socket.socket) -> None:
        while data := self._receive(source):
            try:
                to.sendall(data)
            except OSError:
                return

    @staticmethod
    def _receive(source: socket.socket) -> bytes:
        try:
            return source.recv(1 << 16)
        except OSError:
            return b""


class Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.target = target
        self.stops_at: bytes | None = None
        self.stopped, self.goes_on = threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ports: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", line):
                ports.put(int(found[1]))

    threading.Thread(target=read, daemon=True).start()
    try:
        with Proxy(ports.get(timeout=WITHIN_S)) as made:
            settings = {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.server_address[1]}",
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            for name, value in settings.items():
                monkeypatch.setenv(name, value)
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().mkdir("checkpoints")
            yield made
            made.goes_on.set()
            made.shutdown()
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.kill()
        server.wait(WITHIN_S)


SCRIPT = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1] / "common")!r}]
from checkpointed_group import run
from test_s3 import URL, train
run(Path(sys.argv[1]), 2, train, urls=[URL, URL])
"""


def test_killed_in_mid_upload_other_workers_go_on_from_the_latest_complete_checkpoint(
    proxy: Proxy, tmp_path: Path
) -> None:
    calm = run(tmp_path / "calm", 2, train, urls=["s3://checkpoints/calm"] * 2)
    proxy.stops_at = b"/run/step-00000006/"
    script = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "a")], env=os.environ)
    try:
        assert proxy.stopped.wait(WITHIN_S), "it has not begun to upload step 6"
    finally:
        script.send_signal(signal.SIGKILL)
        assert script.wait(WITHIN_S) == -signal.SIGKILL
    proxy.stops_at = None
    store = RemoteStore(URL)
    assert [found[0].step for found in store.complete_checkpoints()] == [3]
    again = run(tmp_path / "b", 2, train, urls=[URL, URL])
    assert [steps for steps, _ in again] == [list(range(3, 9))] * 2
    assert all(torch.equal(weight, calm[0][1]) for _, weight in again)
    assert [found[0].step for found in store.complete_checkpoints()] == [9, 6]
    assert store.steps() == [9, 6], "retention"


@pytest.mark.parametrize(
    ("variable", "value", "url", "text"),
    [
        ("AWS_ACCESS_KEY_ID", "", URL, "NoCredentialsError"),
        ("AWS_DEFAULT_REGION", "us-east-1", "s3://missing/run", "bucket does not exist"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", URL, "Could not connect to the endpoint URL"),
    ],
)
def test_a_storage_that_cannot_be_used_is_named_before_the_first_step(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, url: str, text: str
) -> None:
    if value:
        monkeypatch.setenv(variable, value)
    else:
        monkeypatch.delenv(variable)
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match=f"{url} cannot be used: .*{text}"):
        RemoteStore(url).check()
