"""`oldformats` is not an installed package: it is imported from beside its tests."""

import sys
from pathlib import Path

from thread_groups import brisk_groups, one_thread_for_torch  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
