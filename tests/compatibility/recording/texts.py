"""Records texts that people and programs keep: invitations, facts, digests, options, files of settings.

Written for commit 330f465; never adapted to a later one.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from oldformats.positions import plain
from oldformats.tiny_training import ExactSGD, tiny_model
from torch import nn

import gridtrain
from gridtrain.bundle import Bundle
from gridtrain.cli import layers_file, network_file
from gridtrain.config import Auto, JoinConfig
from gridtrain.optim.averages import BufferAverage
from gridtrain.optim.flat import model_digest
from gridtrain.optim.given import optimizer_text
from gridtrain.optim.sampler import dataset_digest, permutation, value_digest
from gridtrain.options import PROGRAMS, RunFile, resolve
from gridtrain.options.table import OTHER_VARIABLES, known_variables
from gridtrain.pipeline.building import Blueprint
from gridtrain.pipeline.profiling import Profile
from gridtrain.pipeline.randomness import seed_of_layer, seed_of_step
from gridtrain.protocol import door_rules
from gridtrain.protocol.invitation import Invitation
from gridtrain.protocol.messages import LedgerSpec, Setup
from gridtrain.protocol.round import HISTORY_START, extend_history
from gridtrain.protocol.stage_costs import Layer
from gridtrain.protocol.topology import load_of
from gridtrain.runtime.naming import folder_name
from gridtrain.testing import Faults
from gridtrain.transport.admission import guest_name
from gridtrain.transport.curve import Identity

Write = Callable[[Path, Any], None]

RUN_TOML = """\
# Every key that a run.toml may have, none with its default.

[run]
name = "compat-run.1"
about = "a recorded run"
script = "train.py"
arguments = ["gtopk", "1000"]
files = ["parts/more.txt"]
requires = ["torch>=2.0", "numpy"]
image = "example.org/image:1"

[run.data]
file = "corpus.bin"
digest = "sha256:%s"
where = "https://example.org/corpus.bin"

[coordinator]
listen = "tcp://0.0.0.0:7711"
advertise = "tcp://example.org:7711"
state = "state of the run"
min_workers = 3
order = "joined"
recut_after = 2.5
bundle = false
unencrypted = true
exit_when_finished = true
backup_to = "backups"
backup_every = 7.5
backup_keep = 4
dashboard = "127.0.0.1:7799"
dashboard_open = true
dashboard_hosts = ["grid.example.org", "other.example.org"]

[worker]
invitation = "@invitation.txt"
name = "anna"
upload_limit = "20Mbit"
download_limit = "100Mbit"
donate_limit = "5Mbit"
listen = "tcp://0.0.0.0:7800"
advertise = "tcp://example.org:7800"
export_dir = "export"
state_dir = "checkpoints"
data_dir = "data"
checkpoint_every = 50
checkpoint_keep = 5
handover_mib = 3
relay = false
unencrypted = true
restarts = 2
prefix = true
set = ["battery=pause", "hours=22:00-07:00"]
sensors = "sensors.json"
accept = "sha256:%s"
"""

EXCHANGES = (
    gridtrain.Dense(),
    gridtrain.Dense(topology="ring"),
    gridtrain.Dense(topology="direct"),
    gridtrain.Dense(topology="star"),
    gridtrain.TopK(),
    gridtrain.TopK(density=0.05, momentum=0.9, values="int8"),
    gridtrain.GTopK(density=0.001, values="bf16", warmup=((100, 0.25), (200, 0.0625))),
    gridtrain.GTopK(topology="tree"),
    gridtrain.GTopK(topology="star", values="fp32"),
    gridtrain.LocalSteps(every=32, outer_learning_rate=0.7, outer_momentum=0.9),
    gridtrain.LocalSteps(every=4, exchange=gridtrain.Dense()),
    Auto(),
    Auto(density=0.02, values="int8"),
    Auto(sparse=False),
)


def record(out: Path, write: Write) -> None:
    folder = out / "texts"
    write(folder / "invitations.json", invitations())
    write(folder / "digests.json", digests())
    write(folder / "facts.json", facts())
    write(folder / "options.json", options())
    write(folder / "command_line.json", commands())
    write(folder / "environment.json", environment())
    files_of_people(folder, write)
    package = importlib.resources.files("gridtrain_coordinator.dashboard")
    write(out / "interfaces" / "openapi.json", openapi(json.loads((package / "openapi.json").read_text())))


# -- invitations and digests -----------------------------------------------------------------------


def invitations() -> list[dict[str, Any]]:
    """Texts, their parts, and the form in which the coordinator's journal knows them."""
    coordinator, token = bytes(range(32)), bytes(range(64, 96))
    made = [
        Invitation("tcp://192.168.1.20:7700", coordinator, token, "default"),
        Invitation(
            "tcp://[2001:db8::1]:65535", coordinator, token[::-1], "A.run_with-all.9", encrypted=False
        ),
        Invitation("tcp://a" + 100 * "b" + ".example.org:1", token, coordinator, "r" * 64),
    ]
    recorded = []
    for one in made:
        guest = Identity.from_secret(one.token)
        recorded.append(
            {
                "text": one.text(),
                "parts": plain(one),
                "guest": guest.public.hex(),
                "stored": door_rules.stored_form(guest.public),
            }
        )
    return recorded


def digests() -> dict[str, Any]:
    """Results of everything that hashes, for fixed inputs."""
    key, other = bytes(range(32)), bytes(range(100, 132))
    values: list[Any] = [
        None,
        True,
        7,
        0.5,
        "text",
        b"bytes",
        [1, [2.5]],
        {"a": 1},
        np.arange(3, dtype="<i4"),
    ]
    return {
        "stored form of an invitation": [key.hex(), door_rules.stored_form(key)],
        "guest's name": [key.hex(), b"connection 7".hex(), guest_name(key, b"connection 7").hex()],
        "history": [HISTORY_START.hex(), other.hex(), extend_history(HISTORY_START, other).hex()],
        "folders": {
            name: folder_name(name) for name in ("default", "a.b-c_d", "no run", "../up", "\u00e4", "")
        },
        "values": [_hex(value_digest(value)) for value in values],
        "order of samples": [
            permutation(7, seed, number).tolist() for seed, number in ((0, 0), (5, 1), (2**40, 2**33))
        ],
        "seeds": [seed_of_step(3, 4, 5), seed_of_layer(seed_of_step(3, 4, 5), 1, 2)],
        "initial values": _initial_values(),
    }


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()


def _initial_values() -> list[list[float]]:
    """Uniform draws of the generator: which seed a block has, not how torch draws."""
    blueprint = Blueprint(lambda: [nn.Linear(2, 2), nn.Linear(2, 2)], seed=9, init=_draw)
    return [block.weight.flatten().tolist() for block in blueprint.build(0, 2)]  # type: ignore[union-attr, operator]


@torch.no_grad()
def _draw(block: nn.Module, *_: Any) -> None:
    for parameter in block.parameters():
        parameter.copy_(torch.rand(parameter.shape))


# -- facts: texts that all workers of a run must have alike -----------------------------------------


def facts() -> dict[str, Any]:
    model, frozen = tiny_model(), tiny_model()
    next(frozen.parameters()).requires_grad_(False)
    groups = [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:], "lr": 0.5}]
    samples = [(torch.tensor([i / 8]), i) for i in range(40)]
    described = [exchange.describe() for exchange in EXCHANGES]
    return {
        "exchanges": described,
        "overlaps": [
            gridtrain.Overlap().describe(),
            gridtrain.Overlap(buckets=7, least=1000, adaptive=False).describe(),
        ],
        "chosen by the coordinator": [plain(Auto.parse(text)) for text in described],
        "loads": [plain(load_of(_setup(text))) for text in described],
        "models": [model_digest(model)[0], model_digest(frozen)[0]],
        "buffers": [BufferAverage(model, 100).describe(), BufferAverage(nn.Linear(1, 1), 100).describe()],
        "optimizers": [
            optimizer_text(ExactSGD(model.parameters(), lr=0.25, momentum=0.5)),
            optimizer_text(ExactSGD(groups, lr=0.25, momentum=0.5)),
        ],
        "data": dataset_digest(samples)[0],
        "data that differ": dataset_digest([object()] * 3)[0],
    }


def _setup(exchange: str) -> Setup:
    named = (("model", "1000 parameters in 4 tensors, digest 0123456789ab"), ("exchange", exchange))
    return Setup(named, LedgerSpec(1, 0, steps=1), 1, None)


# -- options, command line, environment -------------------------------------------------------------


def options() -> dict[str, Any]:
    """Names, flags, variables and places in run.toml of every option, with its default."""
    return {
        program: [
            {
                "name": one.name,
                "kind": one.kind.value,
                "default": plain(one.default),
                "flag": one.flag,
                "off flag": one.off_flag,
                "variable": one.variable,
                "run.toml": list(one.toml_place(program)),
                "choices": list(one.choices),
            }
            for one in table
        ]
        for program, table in PROGRAMS.items()
    } | {"variables": sorted(known_variables() | set(OTHER_VARIABLES))}


def commands() -> dict[str, Any]:
    """Arguments and options of every command, by its name on the command line."""
    from gridtrain.cli.main import cli
    from gridtrain.cli.worker_orders import orders

    found: dict[str, Any] = {}

    def walk(name: str, command: click.Command) -> None:
        found[name] = sorted(
            [
                "/".join([*each.opts, *each.secondary_opts])
                for each in command.params
                if each.param_type_name == "option"
            ]
            + [f"<{each.name}>" for each in command.params if each.param_type_name == "argument"]
        )
        if isinstance(command, click.Group):
            context = click.Context(command)
            for inner in command.list_commands(context):
                below = command.get_command(context, inner)
                assert below is not None
                walk(f"{name} {inner}", below)

    walk("gridtrain", cli)
    for name in orders.commands:
        walk(f"gridtrain worker {name}", orders.commands[name])
    found["of the package"] = sorted(gridtrain.__all__)
    return found


def environment() -> dict[str, Any]:
    """What an agent puts into its script's environment, and what the script reads of it, by position."""
    names = [known.name for known in fields(JoinConfig) if known.name != "deadlines"]
    variables = {f"GRIDTRAIN_{name.upper()}": f"value of {name}" for name in names}
    variables["GRIDTRAIN_COORDINATOR_KEY"] = "0123456789abcdef" * 4
    config = plain(JoinConfig.from_environment(variables))
    return {"variables": variables, "read": config[:-1], "defaults": config[-1]}


# -- files that people write ------------------------------------------------------------------------

LAYERS = """\
input = "2kB"

[[layer]]
name = "block"
repeat = 2
parameters = "28MB"
trainable = "14MB"
forward = "1ms"
overhead = "50us"
output = "64kB"
gradient = "32kB"
kept = "1MB"
work = "400kB"
fixed_work = "1kiB"

[[layer]]
forward = 0.002
backward = "3ms"
"""

NETWORK = """\
[[site]]
name = "office"
workers = 3
link = "1Gbit"
latency = "0.2ms"

[[site]]
name = "home"
workers = 2
up = "10Mbit"
down = "100Mbit"
latency = "2ms"

[[between]]
sites = ["office", "home"]
link = "100Mbit"
latency = "15ms"
"""


def files_of_people(folder: Path, write: Write) -> None:
    """run.toml, a bundle, layers and network of `gridtrain plan`, planned faults, sensors."""
    bundle_folder = folder / "bundle"
    (bundle_folder / "parts").mkdir(parents=True, exist_ok=True)
    (bundle_folder / "train.py").write_text('print("a script")\n')
    (bundle_folder / "parts" / "more.txt").write_text("more\n")
    (bundle_folder / "run.toml").write_text(RUN_TOML % ("1" * 64, "2" * 64))
    runfile = RunFile.read(bundle_folder / "run.toml")
    bundle = Bundle.made(runfile)
    assert bundle is not None
    (folder / "bundle.tar").write_bytes(bundle.archive)
    read = {
        program: {
            name: [plain(value.value), value.source]
            for name, value in resolve(program, {}, {}, runfile).items()
        }
        for program in PROGRAMS
    }
    text = json.dumps(read).replace(str(bundle_folder), "FOLDER")
    (folder / "layers.toml").write_text(LAYERS)
    (folder / "network.toml").write_text(NETWORK)
    profile = Profile((Layer("a", 0.5, 1.0, 80, 8, 16, 0.25, 40, 4, 2, 1),), (), 12, 6, "cpu")
    (folder / "profile.toml").write_text(profile.toml())
    network = network_file.read(folder / "network.toml")
    faults = Faults().kill_at("anna", 10, "during").fail_at(1, 3).freeze_at("bert", 4, 2.5, "after")
    faults.slow_at(0, 5, 0.5).corrupt_at(2, 6)
    write(
        folder / "files.json",
        {
            "run.toml": plain(runfile.run),
            "options": json.loads(text),
            "bundle": [bundle.digest, sorted(bundle.files)],
            "layers.toml": plain(layers_file.read(folder / "layers.toml")),
            "profile.toml": plain(layers_file.read(folder / "profile.toml")),
            "network.toml": [
                plain(network.sites),
                [[sorted(pair), *plain(line)] for pair, line in network.between.items()],
            ],
            "faults": faults.text(),
            "planned faults": plain(faults.pending),
            "sensors": {"on_battery": True, "gpu_used": False, "idle_s": 12.5, "temperature_C": 71},
        },
    )


# -- what other programs read -----------------------------------------------------------------------


def openapi(document: dict[str, Any]) -> dict[str, Any]:
    """Names in the description of the dashboard's JSON interface."""
    return {
        "paths": {path: sorted(methods) for path, methods in document["paths"].items()},
        "schemas": {
            name: sorted(schema.get("properties", {}))
            for name, schema in document["components"]["schemas"].items()
        },
        "references": sorted(set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))),
    }
