"""An HTTP server with the file a.txt, whose bytes are the `CONTENT` of the module of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_http_server import Server

from gridtrain.training.data.shard_files import ShardFile, _sha256


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    (tmp_path / "a.txt").write_bytes(request.module.CONTENT)
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def expected(tmp_path: Path, request: pytest.FixtureRequest) -> ShardFile:
    content: bytes = request.module.CONTENT
    (tmp_path / "right").write_bytes(content)
    with (tmp_path / "right").open("rb") as file:
        return ShardFile("a.txt", content.count(b"\n"), len(content), _sha256(file))
