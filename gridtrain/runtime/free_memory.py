"""The free memory on this host or, in a container, within the container's cgroup limit."""

from __future__ import annotations

import re
from pathlib import Path


def free_memory_bytes(system: Path = Path("/")) -> int:
    """Return the number of bytes of memory that a new process on this host, or in this container (cgroup v2),
    can use; 0 if unknown.

    Args:
        system: the folder that contains proc/ and sys/.
    """
    group = system / "sys/fs/cgroup"
    try:
        (kibibytes,) = re.findall(r"MemAvailable: *([0-9]+) kB", (system / "proc/meminfo").read_text())
        free_bytes = 1024 * int(kibibytes)
        if (group / "memory.max").is_file() and (most := (group / "memory.max").read_text().strip()) != "max":
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(counts["active_file"]) + int(counts["inactive_file"])  # freed when needed
            free_bytes = min(free_bytes, int(most) - int((group / "memory.current").read_text()) + cached)
    except (OSError, ValueError, KeyError):
        return 0
    return max(1, free_bytes)
