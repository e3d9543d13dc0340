"""`python -m gridtrain_coordinator`: the coordinator configured by environment variables, for containers.

    GRIDTRAIN_RUN  GRIDTRAIN_LISTEN  GRIDTRAIN_STATE  ...      or a run.toml in the working directory
    GRIDTRAIN_DASHBOARD (HOST:PORT, or "off")  GRIDTRAIN_DASHBOARD_OPEN  GRIDTRAIN_DASHBOARD_HOSTS

`gridtrain coordinator --help` describes the same settings as command-line options.
"""

from __future__ import annotations

import os
import sys

from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.tools.options import RunFile, resolve
from gridtrain_coordinator.serving import serve_and_log_errors
from gridtrain_coordinator.settings import settings_from


def main() -> int:
    try:
        chosen = resolve("coordinator", {}, os.environ, RunFile.find(os.environ))
        return serve_and_log_errors(settings_from(chosen), out=sys.stdout, err=sys.stderr)
    except GridtrainError as error:
        print(f"gridtrain: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
