"""What a person can choose for a coordinator or a worker, and where each choice comes from.

Decides names, bounds and defaults of options, once, in `table`; flags, `GRIDTRAIN_*` variables, the keys of
run.toml, `gridtrain config show` and docs/configuration.md are made from it.  Never opens a socket, and knows
no command-line library.

    --upload-limit 20Mbit            the command line
    GRIDTRAIN_UPLOAD_LIMIT=20Mbit    else the environment
    [worker]                         else run.toml, in the folder where the command is typed,
    upload_limit = "20Mbit"            or the file that GRIDTRAIN_CONFIG names
                                     else the default
"""

from gridtrain.tools.options.option_table import PROGRAMS, Option, OptionKind
from gridtrain.tools.options.resolve import OptionValues, ResolvedValue, resolve
from gridtrain.tools.options.runfile import RunFile

__all__ = ["PROGRAMS", "Option", "OptionKind", "OptionValues", "ResolvedValue", "RunFile", "resolve"]
