"""`python -m gridtrain_coordinator`: the coordinator without a command line, for containers.

    GRIDTRAIN_RUN  GRIDTRAIN_LISTEN  GRIDTRAIN_ADVERTISE  GRIDTRAIN_STATE  GRIDTRAIN_MIN_WORKERS
    GRIDTRAIN_BACKUP_TO

The same choices as options: `gridtrain coordinator --help`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gridtrain.config import ENV_PREFIX
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain_coordinator.daemon import Settings, serve


def main() -> int:
    try:
        return serve(_settings(), out=sys.stdout, err=sys.stderr)
    except GridtrainError as error:
        print(f"gridtrain: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _settings() -> Settings:
    def chosen(name: str, default: str) -> str:
        return os.environ.get(ENV_PREFIX + name) or default

    defaults, state, min_workers = Settings(), chosen("STATE", ""), chosen("MIN_WORKERS", "1")
    backup_to = chosen("BACKUP_TO", "")
    if not min_workers.isdigit():
        raise ConfigError(f"GRIDTRAIN_MIN_WORKERS is {min_workers!r}", remedy="write a number >= 1")
    return Settings(
        run=chosen("RUN", defaults.run),
        listen=chosen("LISTEN", defaults.listen),
        advertise=chosen("ADVERTISE", defaults.advertise),
        state=Path(state) if state else None,
        min_workers=int(min_workers),
        backup_to=Path(backup_to) if backup_to else None,
    )


if __name__ == "__main__":
    sys.exit(main())
