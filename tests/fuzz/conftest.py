"""`gridfuzz` is not an installed package: it is imported from beside its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
