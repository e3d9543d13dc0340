"""`oldformats` is no installed package: it lies beside the tests that use it."""

import sys
from pathlib import Path

from thread_groups import brisk_groups, one_thread_for_torch  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
