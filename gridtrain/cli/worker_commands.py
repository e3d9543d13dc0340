"""`gridtrain worker set|show|pause|resume|stop`: the owner's word to a worker that runs on this machine.

Decides how an answer looks.  What a word means is `gridtrain_worker.policy_enforcer`'s; it travels over a socket that
only this user may open.  Exit codes as everywhere; 2 where no worker runs, or a rule cannot be kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from gridtrain.cli.main import EXIT_CODES

Command = TypeVar("Command", bound=Callable[..., Any])


def _of_a_worker(command: Command) -> Command:
    name = click.option(
        "--worker", default="", metavar="NAME",
        help="Where several run on this machine: its name, RUN/NAME, or 6 digits of its key.",
    )  # fmt: skip
    as_json = click.option(
        "--json", "as_json", is_flag=True, help="As one JSON object; also where it is piped."
    )
    return name(as_json(command))


@click.group(epilog=EXIT_CODES)
def worker_commands() -> None:
    """Tell a worker that runs on this machine what it may do."""


def _keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: what can be set."""
    from gridtrain_worker.training_policy import KEYS

    return [f"{key}=" for key in KEYS if key.startswith(incomplete)]


@worker_commands.command("set")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...", shell_complete=_keys)
@_of_a_worker
def set_rules(settings: tuple[str, ...], worker: str, as_json: bool) -> None:
    """Change rules, from now on and over restarts.

    \b
      upload=20Mbit  download=100Mbit   what it may use of the line; off: everything
      budget=5GB                        sent and received in a day; off: any number
      hours=22:00-07:00,12:00-13:00     local time; off: at any time
      battery=pause                     pause on battery; run: do not
      gpu=pause                         pause while another program uses the GPU; run: do not
      idle=10m                          pause until nobody has touched the computer for so long; off: do not
      temperature=80/70                 pause at 80 C, go on below 70; off: no limit
    """
    from gridtrain_worker.training_policy import parse_pairs

    _say(_ask(worker, {"ask": "set", "settings": parse_pairs(settings)}), as_json)


@worker_commands.command()
@_of_a_worker
def show(worker: str, as_json: bool) -> None:
    """Its rules, what its sensors say, and whether it trains."""
    _say(_ask(worker, {"ask": "show"}), as_json)


@worker_commands.command()
@click.option(
    "--for", "length", default="", metavar="TIME", help="Such as 30m or 2h.  [default: until resume]"
)
@_of_a_worker
def pause(length: str, worker: str, as_json: bool) -> None:
    """Leave the group after this step, and wait."""
    _say(_ask(worker, {"ask": "pause", "for": length}), as_json)


@worker_commands.command()
@_of_a_worker
def resume(worker: str, as_json: bool) -> None:
    """Take `pause` back; the rules hold on."""
    _say(_ask(worker, {"ask": "resume"}), as_json)


@worker_commands.command()
@click.option("--after-step", is_flag=True, help="The same, in more words: it is what stop does.")
@_of_a_worker
def stop(after_step: bool, worker: str, as_json: bool) -> None:
    """Finish the step that is being computed, hand over what was not sent, leave the run, and end.

    Not even that step: Ctrl-C where the worker runs, or SIGTERM to it.  Only for a while: pause.
    """
    _say(_ask(worker, {"ask": "stop"}), as_json)


def _ask(worker: str, question: dict[str, Any]) -> dict[str, Any]:
    from gridtrain.errors import ConfigError
    from gridtrain_worker.control_socket import ask_agent, find_worker

    try:
        return ask_agent(find_worker(worker), question)
    except (OSError, ValueError, StopIteration):
        raise ConfigError("the worker does not answer", remedy="try again; it may just be ending") from None


def _say(shown: Mapping[str, Any], as_json: bool) -> None:
    if as_json or not sys.stdout.isatty():
        click.echo(json.dumps(shown))
        return
    reason = f": {shown['reason']}" if shown["reason"] else ""
    click.echo(
        f"{shown['name']} is {shown['state']}{reason}{' (ends after this step)' if shown['stopping'] else ''}"
    )
    if not shown["obeyed"]:
        click.echo("  its script is in the middle of a step, and leaves after it")
    click.echo("  " + "  ".join(f"{key}={value}" for key, value in shown["rules"].items()))
    click.echo(f"  its clock: {shown['clock']}")
    click.echo(f"  sent and received today: {shown['moved_today_bytes'] / 1e6:,.1f} MB")
    for name, value in shown["readings"].items():
        text = f"cannot be read: {shown['absent'].get(name)}" if value is None else value
        click.echo(f"  sensor {name}: {text}")
