"""Stored texts keep their meaning: invitations, facts, options, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from oldformats.files import DATA, recorded
from oldformats.library import (
    EMPTY_HISTORY,
    OTHER_VARIABLES,
    PROGRAMS,
    Auto,
    Blueprint,
    BufferAveraging,
    Bundle,
    ConfigError,
    Faults,
    FileSensors,
    Identity,
    Invitation,
    JoinConfig,
    RunFile,
    canonical_parameters,
    command_line,
    derive_layer_seed,
    derive_step_seed,
    describe_dataset,
    describe_optimizer,
    describe_parameters,
    extend_history,
    invitation_digest,
    known_variables,
    parse_invitation,
    pending_member_name,
    permutation,
    read_layers,
    read_network,
    resolve,
    run_folder_name,
    value_digest,
    worker_commands,
    workload_of,
)
from oldformats.positions import plain
from oldformats.tiny_training import ExactSGD, tiny_model
from torch import nn

import gridtrain

TEXTS = DATA / "texts"


# -- invitations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "known", recorded("texts/invitations.json"), ids=lambda known: known["parts"][3][:10]
)
def test_an_old_invitation_is_read_and_written_as_it_was(known: dict[str, Any]) -> None:
    found = parse_invitation(f' "{known["text"][:40]}\n{known["text"][40:]}" ')
    assert plain(found) == known["parts"]
    address, coordinator, token, run, encrypted = known["parts"]
    coordinator, token = (bytes.fromhex(part["hex"]) for part in (coordinator, token))
    assert Invitation(address, coordinator, token, run, encrypted).text() == known["text"]


@pytest.mark.parametrize(
    "known", recorded("texts/invitations.json"), ids=lambda known: known["parts"][3][:10]
)
def test_an_invitation_has_the_same_key(known: dict[str, Any]) -> None:
    pending = Identity.from_secret(parse_invitation(known["text"]).token).public
    assert pending.hex() == known["guest"]
    assert invitation_digest(pending) == known["stored"]


def test_a_damaged_invitation_is_refused_with_what_to_do() -> None:
    text = recorded("texts/invitations.json")[0]["text"]
    changed = text[:60] + ("A" if text[60] != "A" else "B") + text[61:]
    for wrong in (text[:-3], changed, text.replace("gridtrain1:", "gridtrain2:")):
        with pytest.raises(ConfigError) as refused:
            parse_invitation(wrong)
        assert refused.value.remedy


# -- digests ---------------------------------------------------------------------------------------


def test_keys_and_histories_have_the_same_hashes() -> None:
    known = recorded("texts/digests.json")
    key, stored = known["stored form of an invitation"]
    assert invitation_digest(bytes.fromhex(key)) == stored
    key, connection, name = known["guest's name"]
    assert pending_member_name(bytes.fromhex(key), bytes.fromhex(connection)).hex() == name
    start, step, history = known["history"]
    assert EMPTY_HISTORY.hex() == start
    assert extend_history(EMPTY_HISTORY, bytes.fromhex(step)).hex() == history


def test_folders_of_runs_keep_their_names() -> None:
    known = recorded("texts/digests.json")["folders"]
    assert {run: run_folder_name(run) for run in known} == known


def test_samples_have_the_same_hashes() -> None:
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
    found = [value_digest(value) for value in values]
    assert [None if each is None else each.hex() for each in found] == recorded("texts/digests.json")[
        "values"
    ]


def test_samples_are_in_the_same_order() -> None:
    found = [permutation(7, seed, number).tolist() for seed, number in ((0, 0), (5, 1), (2**40, 2**33))]
    assert found == recorded("texts/digests.json")["order of samples"]


def test_layers_draw_from_the_same_seeds() -> None:
    known = recorded("texts/digests.json")
    assert [derive_step_seed(3, 4, 5), derive_layer_seed(derive_step_seed(3, 4, 5), 1, 2)] == known["seeds"]

    @torch.no_grad()
    def draw(block: nn.Module, *_: Any) -> None:
        for parameter in block.parameters():
            parameter.copy_(torch.rand(parameter.shape))

    blueprint = Blueprint(lambda: [nn.Linear(2, 2), nn.Linear(2, 2)], seed=9, init=draw)
    weights = [dict(block.named_parameters())["weight"] for block in blueprint.build(0, 2)]
    assert [weight.flatten().tolist() for weight in weights] == known["initial values"]


# -- facts: a worker that joins an old run must describe its training in the same words --------------

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
    gridtrain.Auto(),
    gridtrain.Auto(density=0.02, values="int8"),
    gridtrain.Auto(sparse=False),
)


def test_exchanges_have_the_same_descriptions() -> None:
    known = recorded("texts/facts.json")
    assert [exchange.describe() for exchange in EXCHANGES] == known["exchanges"]
    overlaps = [gridtrain.Overlap(), gridtrain.Overlap(buckets=7, least=1000, adaptive=False)]
    assert [overlap.describe() for overlap in overlaps] == known["overlaps"]


def test_a_coordinator_parses_descriptions_of_exchanges_as_before() -> None:
    known = recorded("texts/facts.json")
    assert [plain(Auto.parse(text)) for text in known["exchanges"]] == known["chosen by the coordinator"]
    model = ("model", "1000 parameters in 4 tensors, digest 0123456789ab")
    loads = [plain(workload_of(dict([model, ("exchange", text)]))) for text in known["exchanges"]]
    assert [load and load[:5] for load in loads] == known["loads"], "before dense values could be rounded"
    assert {load[5] for load in loads if load} == {"fp32"}


def test_models_optimizers_and_data_have_the_same_descriptions() -> None:
    known, model, frozen = recorded("texts/facts.json"), tiny_model(), tiny_model()
    next(frozen.parameters()).requires_grad_(False)
    assert [describe_parameters(canonical_parameters(each)) for each in (model, frozen)] == known["models"]
    buffers = [BufferAveraging(each, 100).describe() for each in (model, nn.Linear(1, 1))]
    assert buffers == known["buffers"]
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}]
    optimizers = [ExactSGD(each, lr=0.25, momentum=0.5) for each in (parameters, groups)]
    assert [describe_optimizer(each) for each in optimizers] == known["optimizers"]
    assert describe_dataset([(torch.tensor([i / 8]), i) for i in range(40)]) == known["data"]
    assert describe_dataset([object()] * 3) == known["data that differ"]


# -- options, commands, environment ----------------------------------------------------------------


@pytest.mark.parametrize("program", ["coordinator", "worker"])
def test_no_option_was_removed_or_changed_its_meaning(program: str) -> None:
    here = {
        one.name: {
            "name": one.name,
            "kind": one.kind.value,
            "default": plain(one.default),
            "flag": one.flag,
            "off flag": one.off_flag,
            "variable": one.variable,
            "run.toml": list(one.toml_location(program)),
            "choices": list(one.choices),
        }
        for one in PROGRAMS[program]
    }
    for known in recorded("texts/options.json")[program]:
        assert here.get(known["name"]) == known


def test_environment_variables_still_exist() -> None:
    known = set(recorded("texts/options.json")["variables"])
    assert known <= known_variables() | set(OTHER_VARIABLES)


def commands() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {
        f"gridtrain worker {n}": c for n, c in worker_commands.commands.items()
    }

    def walk(name: str, command: click.Command) -> None:
        found[name] = command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for inner in command.list_commands(context):
                below = command.get_command(context, inner)
                assert below is not None
                walk(f"{name} {inner}", below)

    walk("gridtrain", command_line)
    return found


def test_commands_still_accept_the_same_arguments() -> None:
    known, here = dict(recorded("texts/command_line.json")), commands()
    known.pop("of the package")
    for name, words in known.items():
        assert name in here, f"there is no {name} any more"
        options = {
            word
            for each in here[name].params
            if each.param_type_name == "option"
            for word in ("/".join([*each.opts, *each.secondary_opts]), *each.opts)
        }
        arguments = sum(each.param_type_name == "argument" for each in here[name].params)
        assert {word for word in words if word.startswith("--")} <= options, name
        assert sum(word.startswith("<") for word in words) == arguments, name


def test_the_package_still_exports_the_same_names() -> None:
    assert set(recorded("texts/command_line.json")["of the package"]) <= set(gridtrain.__all__)
    assert all(hasattr(gridtrain, name) for name in gridtrain.__all__)


def test_a_script_reads_the_environment_of_an_old_agent() -> None:
    known = recorded("texts/environment.json")
    found = plain(JoinConfig.from_environment(known["variables"]))
    assert found[: len(known["read"])] == known["read"] and found[-1] == known["defaults"]


# -- files that users write ------------------------------------------------------------------------


def test_an_old_run_toml_is_read() -> None:
    known = recorded("texts/files.json")
    runfile = RunFile.read(TEXTS / "bundle" / "run.toml")
    *run, (*data, index, url, nbytes) = plain(runfile.run)  # the last three were added later
    assert [*run, data] == known["run.toml"] and (index, url, nbytes) == ("", "", 0)
    for program, values in known["options"].items():
        resolved = resolve(program, {}, {}, runfile)
        for name, (value, source) in values.items():
            found = plain(resolved[name].value)
            if isinstance(found, str):
                found = found.replace(str(TEXTS / "bundle"), "FOLDER")
            assert (found, resolved[name].source) == (value, source), f"{program} {name}"


def test_a_mistyped_key_is_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match="upload_limits") as refused:
        RunFile.parse(b'[worker]\nupload_limits = "1Mbit"\n', Path("run.toml"))
    assert "'upload_limit'" in refused.value.remedy


def test_a_bundle_has_the_digest_that_volunteers_have_accepted() -> None:
    digest, files = recorded("texts/files.json")["bundle"]
    made = Bundle.from_run_file(RunFile.read(TEXTS / "bundle" / "run.toml"))
    archive = (TEXTS / "bundle.tar").read_bytes()
    assert made is not None and (made.digest, sorted(made.files), made.archive) == (digest, files, archive)
    opened = Bundle.from_archive(archive, digest)
    assert sorted(opened.files) == files and opened.run == made.run


def test_files_of_layers_and_networks_are_read() -> None:
    known = recorded("texts/files.json")
    for name in ("layers.toml", "profile.toml"):
        assert plain(read_layers(TEXTS / name)) == known[name]
    network = read_network(TEXTS / "network.toml")
    between = [[sorted(pair), *plain(line)] for pair, line in network.between.items()]
    assert [plain(network.sites), between] == known["network.toml"]


def test_planned_faults_and_sensors_are_read(tmp_path: Path) -> None:
    known = recorded("texts/files.json")
    planned = Faults.parse(known["faults"])
    assert plain(planned.pending) == known["planned faults"]
    assert planned.text() == known["faults"]
    (tmp_path / "sensors.json").write_text(json.dumps(known["sensors"]))
    readings = FileSensors(tmp_path / "sensors.json").read(())
    assert plain(readings) == [True, False, 12.5, 71.0, {}]
