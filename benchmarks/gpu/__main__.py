"""`make gpu`: all tests and measurements that need a GPU, within ten minutes on one card.

python -m gpu                            all parts; results/gpu.json and gpu.md
python -m gpu --part selection bits      only these parts; the results of others remain in the file
python -m gpu --device cpu --small       run all parts without a GPU; files in gpu-results/

Each part runs in its own process, so that an error on the device, or a part that hangs, does not affect the
others.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.parts import PARTS, Part, Setting, missing_packages
from gridtrain.tools.child_processes import end_processes
from record import machine, replace

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
BUDGET_S = 540.0
GRACE_S = 25.0  # for a part that starts processes, which ends them
MIN_S = 10.0

Outcome = dict[str, Any]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=[], metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu")
    parser.add_argument("--small", action="store_true", help="sizes that take a CPU seconds")
    parser.add_argument("--out", type=Path, help="the folder of the two files")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # MODULE:NAME, to be run in this process
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.out is None:
        options.out = Path("gpu-results") if options.small else BENCHMARKS / "results"
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu needs --small, because the usual sizes take a CPU hours")
    return options


def why_not(device: str) -> str:
    """Return why this device cannot be measured; "" if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return f"no CUDA device: torch {torch.__version__} is {built}, and torch.cuda.is_available() is False"
    return ""


# -- one part, in its own process --------------------------------------------------------------------


def child(function: str, setting: Setting, into: Path) -> int:
    """Run a part's function and write the figures that it stores; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it cleans up
    outcome: Outcome = {"figures": {}, "machine": {}}

    def store(name: str, value: Any) -> None:
        outcome["figures"][name] = value
        replace(into, json.dumps(outcome))

    try:
        outcome["machine"] = machine(setting.device)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(setting, store)
    except Exception as error:
        traceback.print_exc()
        outcome["error"] = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    replace(into, json.dumps(outcome))
    return 1 if "error" in outcome else 0


def run_part(part: Part, setting: Setting, limit_s: float) -> Outcome:
    """Run a part in a process, which is ended after `limit_s`; return its figures and its error."""
    if missing := missing_packages(part.needs):
        return {"skipped": f"needs {', '.join(missing)}: not installed"}
    if limit_s < MIN_S:
        return {"error": f"not started: only {max(0.0, limit_s):.0f} s of {BUDGET_S:.0f} s were left"}
    argv = [sys.executable, "-m", "gpu", "--child", part.function, "--device", setting.device]
    argv += ["--small"] if setting.small else []
    began_s, error = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="gridtrain-gpu-") as folder:
        into = Path(folder) / "outcome.json"
        process = subprocess.Popen([*argv, "--into", str(into)], cwd=BENCHMARKS, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            error = f"took more than {limit_s:.0f} s"
        finally:
            end_processes([process], (GRACE_S,))
        outcome: Outcome = json.loads(into.read_text()) if into.exists() else {}
    if process.returncode and not error:
        error = outcome.get("error", f"its process ended with exit code {process.returncode}")
    return outcome | {"seconds": round(time.monotonic() - began_s, 1)} | ({"error": error} if error else {})


# -- all of them ---------------------------------------------------------------------------------------


def load(path: Path, setting: Setting) -> dict[str, Any]:
    """Return the earlier results of the same kind of device, to which a run of some parts adds."""
    kind = {"device": setting.device, "small": setting.small}
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text())
        if found.items() >= kind.items():
            return found
    return {**kind, "machine": {}, "parts": {}}


def run(options: argparse.Namespace) -> int:
    from gpu import report

    setting, out = Setting(options.device, options.small), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    record = load(out / "gpu.json", setting) if options.part else load(Path(os.devnull), setting)
    began_s = time.monotonic()
    for name in options.part or PARTS:
        print(f"make gpu: {name}", flush=True)
        left_s = BUDGET_S - (time.monotonic() - began_s)
        outcome = run_part(PARTS[name], setting, min(PARTS[name].limit_s, left_s))
        record["machine"] = outcome.pop("machine", {}) or record["machine"]
        record["parts"][name] = {"date": datetime.date.today().isoformat()} | outcome
        replace(out / "gpu.json", json.dumps(record, indent=1) + "\n")
        replace(out / "gpu.md", report.markdown(record))
        print(f"make gpu: {name}: {report.verdict(outcome)}", flush=True)
    print(f"make gpu: results in {out}/gpu.json and gpu.md")
    return 1 if any("error" in record["parts"][name] for name in options.part or PARTS) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    if options.child:
        return child(options.child, Setting(options.device, options.small), options.into)
    if reason := why_not(options.device):
        print(f"make gpu: skipped, {reason}")
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
