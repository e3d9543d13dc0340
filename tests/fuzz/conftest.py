"""`gridfuzz` is no installed package: it lies beside its tests, as `python tests/fuzz` finds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
