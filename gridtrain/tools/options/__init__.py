"""Options of the coordinator and the worker: their table, defaults, run.toml and the sources of their values.

`option_table` defines names, bounds and defaults; flags, `GRIDTRAIN_*` variables, keys of run.toml,
`gridtrain config show` and docs/configuration.md are derived from it.  `resolve` finds the value that
applies, `runfile` reads run.toml.

The value comes from the first of these sources that sets the option:

    --upload-limit 20Mbit            the command line
    GRIDTRAIN_UPLOAD_LIMIT=20Mbit    the environment
    [worker]                         run.toml in the working directory,
    upload_limit = "20Mbit"            or the file that GRIDTRAIN_CONFIG names
                                     the default
"""

from gridtrain.tools.options.option_table import PROGRAMS, Option, OptionKind
from gridtrain.tools.options.resolve import OptionValues, ResolvedValue, resolve
from gridtrain.tools.options.runfile import RunFile

__all__ = ["PROGRAMS", "Option", "OptionKind", "OptionValues", "ResolvedValue", "RunFile", "resolve"]
