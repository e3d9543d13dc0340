"""Measures how long an honest join takes, several times in turn, each time with a new key.

    python -m hostile.newcomer INVITATION 5

A join lasts until `gridtrain.join` returns: the handshake in which the unknown key is refused, the one with
the key of the invitation, the enrolment, the member's own handshake, Join and Welcome.  Each line of stdout
is one JSON object: `loaded`, then `joined` with `took_s` or `failed` with `reason`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import gridtrain
from gridtrain.errors import GridtrainError
from lab.group import say


def main() -> None:
    invitation, count = sys.argv[1], int(sys.argv[2])
    gridtrain.join  # noqa: B018  (lazy: this imports torch, which must not be measured)
    say("loaded", pid=os.getpid())
    for _ in range(count):
        with tempfile.TemporaryDirectory() as state:
            os.environ["XDG_STATE_HOME"] = state
            began_s = time.monotonic()
            try:
                with gridtrain.join(invitation):
                    say("joined", took_s=time.monotonic() - began_s)
            except GridtrainError as error:
                say("failed", took_s=time.monotonic() - began_s, reason=str(error)[:200])


if __name__ == "__main__":
    main()
