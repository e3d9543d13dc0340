"""`gridtrain coordinator`, except that it waits two seconds, not sixty, for members that are all away.

python brisk_coordinator.py --state FOLDER ...
"""

from __future__ import annotations

import sys
from functools import partial

from gridtrain.cli import main
from gridtrain.config import Deadlines
from gridtrain_coordinator import serving

if __name__ == "__main__":
    serving.Deadlines = partial(Deadlines, regather_s=2.0)  # type: ignore[assignment, attr-defined]
    main(["coordinator", *sys.argv[1:]])
