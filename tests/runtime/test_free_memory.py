"""The memory that is free on a host and in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from gridtrain.runtime.free_memory import free_memory_bytes


def machine(folder: Path, available: str, **group: str) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text(f"MemTotal:       24 kB\n{available}\nBuffers: 1 kB\n")
    (folder / "sys/fs/cgroup").mkdir(parents=True)
    for name, value in group.items():
        (folder / f"sys/fs/cgroup/memory.{name}").write_text(f"{value}\n")
    return folder


STAT = "anon 700\nactive_file 100\ninactive_file 200"


@pytest.mark.parametrize(
    ("available", "group", "free_bytes"),
    [
        ("MemAvailable:   16000 kB", {}, 16_384_000),
        ("MemAvailable:   16000 kB", {"max": "max", "current": "5"}, 16_384_000),
        ("MemAvailable:   16000 kB", {"max": "4000", "current": "1000", "stat": STAT}, 3300),
        ("MemAvailable:   1 kB", {"max": "4000", "current": "1000", "stat": STAT}, 1024),
        ("MemAvailable:   1 kB", {"max": "4000", "current": "5000", "stat": STAT}, 1),
        ("MemAvailable:   0 kB", {}, 1),
        ("MemAvailable:   1 kB", {"max": "4000"}, 0),
        ("MemAvailable:   1 kB", {"max": "4000", "current": "1000", "stat": "anon 1"}, 0),
        ("", {}, 0),
    ],
)
def test_free_memory_is_that_of_the_host_and_of_the_container(
    tmp_path: Path, available: str, group: dict[str, str], free_bytes: int
) -> None:
    """The page cache is free; 0 means that nothing is known."""
    assert free_memory_bytes(machine(tmp_path, available, **group)) == free_bytes
