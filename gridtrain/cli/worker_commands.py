"""`gridtrain worker set|show|pause|resume|stop`: controls the workers on this machine and sets their rules.

The commands are sent over a socket that only this user can open.  `gridtrain_worker.policy_enforcer`
executes them and answers with the worker's new state.  Exit code 2 means that no such worker is running, that
it does not answer, that a rule cannot be enforced, or that an option is invalid.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from gridtrain.cli.option_flags import Command
from gridtrain.quantities import format_age, format_bytes, format_duration

NO_RULE = ("off", "run")
"""The rule values that restrict nothing."""

SLOW_UPLOAD = "200kbit"
"""An upload limit below this causes a warning, because a slice of a dense exchange (`MIN_SLICE_BYTES` of a
segment of up to 1 MiB, more of a larger segment) would take longer than `Deadlines.patience_floor_s`."""


def _options(command: Command) -> Command:
    for one in (
        click.option(
            "--json/--table",
            "as_json",
            default=None,
            help="Print one JSON object per worker, or text.  [default: text on a terminal]",
        ),
        click.option("--all", "to_all", is_flag=True, help="Select all of your workers on this machine."),
        click.option(
            "--worker",
            default="",
            metavar="NAME",
            help="Select one worker by name, RUN/NAME, or first 6 key digits.",
        ),
    ):
        command = one(command)
    return command


@click.group()
def worker_commands() -> None:
    """Control a worker that runs on this machine."""


def _keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the keys of rules that begin with `incomplete`, for shell completion."""
    from gridtrain_worker.training_policy import KEYS

    return [f"{key}=" for key in KEYS if key.startswith(incomplete)]


@worker_commands.command("set")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...", shell_complete=_keys)
@_options
def set_rules(settings: tuple[str, ...], worker: str, to_all: bool, as_json: bool | None) -> None:
    """Change rules, now and for later starts; KEY=off removes a rule.

    \b
      upload=20Mbit  download=100Mbit   rate limits
      budget=5GB                        bytes sent plus bytes received in a day
      hours=22:00-07:00,12:00-13:00     train only at these hours, local time
      battery=pause                     pause while running on battery power
      gpu=pause                         pause while another program uses the GPU
      idle=10m                          pause until unused for this long
      temperature=80/70                 pause at 80 C, continue below 70 C
    """
    from gridtrain_worker.training_policy import parse_pairs

    _ask(worker, to_all, {"ask": "set", "settings": parse_pairs(settings)}, as_json)


@worker_commands.command()
@_options
def show(worker: str, to_all: bool, as_json: bool | None) -> None:
    """Show the state, rules and sensor readings of a worker; without --worker, those of all workers."""
    _ask(worker, to_all or not worker, {"ask": "show"}, as_json)


@worker_commands.command()
@click.option(
    "--for",
    "length",
    default="",
    metavar="TIME",
    help="Length of the pause, such as 30m or 2h.  [default: until resume]",
)
@_options
def pause(length: str, worker: str, to_all: bool, as_json: bool | None) -> None:
    """Leave the group after the current step and wait."""
    _ask(worker, to_all, {"ask": "pause", "for": length}, as_json)


@worker_commands.command()
@_options
def resume(worker: str, to_all: bool, as_json: bool | None) -> None:
    """End a pause; the rules still apply."""
    _ask(worker, to_all, {"ask": "resume"}, as_json)


@worker_commands.command()
@click.option("--after-step", is_flag=True, hidden=True, help="Has no effect; older scripts pass it.")
@_options
def stop(after_step: bool, worker: str, to_all: bool, as_json: bool | None) -> None:
    """Finish the current step, transfer the residual, leave the run, and exit.

    A script that does not end within two minutes is terminated with SIGTERM.  To stop immediately, press
    Ctrl-C in the worker's terminal, or send the worker SIGTERM.
    """
    _ask(worker, to_all, {"ask": "stop"}, as_json)


def _ask(worker: str, to_all: bool, question: dict[str, Any], as_json: bool | None) -> None:
    """Send `question` to the selected worker, or to all workers, and show each answer.

    Raises `ConfigError` if there is no such worker and, after all others have been asked, if one refuses or
    does not answer.
    """
    from gridtrain.errors import ConfigError
    from gridtrain_worker.control_socket import ask_agent, find_worker, find_workers

    as_json = not sys.stdout.isatty() if as_json is None else as_json
    if worker and to_all:
        raise click.UsageError("--worker and --all were both given")
    failures: list[ConfigError] = []
    shown: list[str] = []  # sensor lines already printed; workers on one machine usually share the sensors
    for path in find_workers() if to_all else [find_worker(worker)]:
        try:
            answer = ask_agent(path, question)
        except ConfigError as error:
            failures.append(error)
            continue
        except (OSError, ValueError, StopIteration):
            failures.append(
                ConfigError("the worker does not answer", remedy="try again; the worker may be shutting down")
            )
            continue
        if as_json:
            click.echo(json.dumps(answer))
            continue
        lines, sensors = state_lines(answer), sensor_lines(answer)
        if question["ask"] == "resume" and answer["state"] == "paused":
            lines.insert(1, "  its rules pause it; to change them, run gridtrain worker set")
        click.echo("\n".join(lines + (sensors if sensors != shown else [])))
        shown = sensors
    if failures:
        reasons = dict.fromkeys(failure.reason for failure in failures)
        remedies = dict.fromkeys(failure.remedy for failure in failures)
        raise ConfigError("; ".join(reasons), remedy="; ".join(filter(None, remedies)))


def state_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return a worker's state and rules as lines of text."""
    reason = f": {answer['reason']}" if answer["reason"] else ""
    ending = " (ends after this step)" if answer["stopping"] else ""
    waits = [] if answer["obeyed"] else ["  its script will finish the current step and then leave the group"]
    rules = [f"{key}={value}" for key, value in answer["rules"].items() if value not in NO_RULE]
    return [
        f"{answer['name']} ({answer['run']}) is {answer['state']}{reason}{ending}",
        *waits,
        f"  rules: {'  '.join(rules) or 'none'}",
        *_slow_upload_lines(answer["rules"].get("upload", "off")),
        f"  local time: {answer['clock']}",
        f"  sent and received today: {answer['moved_today_bytes'] / 1e6:,.1f} MB",
    ]


def _slow_upload_lines(upload: str) -> list[str]:
    from gridtrain.core.collectives.ring import MIN_SLICE_BYTES
    from gridtrain.network.transport.rate_limiter import parse_rate

    if upload in NO_RULE or (rate_Bps := parse_rate(upload)) >= parse_rate(SLOW_UPLOAD):
        return []
    return [
        f"  with upload={upload} a message of {format_bytes(MIN_SLICE_BYTES)} or more takes at least "
        f"{format_age(MIN_SLICE_BYTES / rate_Bps)}, and the group waits for it; set upload={SLOW_UPLOAD} "
        "or more, or pause this worker"
    ]


def sensor_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return lines with the sensors' readings and, if a needed one is missing, with the reason."""
    from gridtrain.core.group.sensor_readings import NO_VALUE, NOT_NEEDED

    lines: list[str] = []
    absent: dict[str, list[str]] = {}
    for name, value in answer["readings"].items():
        if value is not None:
            lines.append(f"  {name}: {_reading(name, value)}")
        elif (reason := str(answer["absent"].get(name, NO_VALUE))) != NOT_NEEDED:
            absent.setdefault(reason, []).append(name)
    return lines + [f"  {', '.join(names)}: not available ({reason})" for reason, names in absent.items()]


def _reading(name: str, value: Any) -> str:
    match name:
        case "battery":
            return "on battery" if value else "plugged in"
        case "gpu":
            return "used by another program" if value else "not used by other programs"
        case "idle":
            return f"for {format_duration(value)}"
        case _:
            return f"{value:.0f} C"
