"""`gridtrain plan`: its output for networks described by options, by a file, and by a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from gridtrain.cli.live_network import network_from_status
from gridtrain.cli.main import cli, main
from gridtrain.cli.network_file import parse_seconds, read_network, single_site
from gridtrain.errors import ConfigError

SITES = """
[[site]]
name = "office"
workers = 6
link = "1Gbit"
latency = "0.2ms"

[[site]]
name = "home"
workers = 2
up = "20Mbit"
down = "100Mbit"

[[between]]
sites = ["home", "office"]
link = "50Mbit"
latency = "15ms"
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=True)


def figures(*arguments: str) -> dict[tuple[str, int], dict[str, float]]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return {(each["exchange"], each["workers"]): each for each in json.loads(done.output)}


def test_the_table_has_the_expected_figures() -> None:
    """With two workers a ring sends all 4 MB once, 0.32 s at 12.5 MB/s; with four 1.5 times that."""
    done = run("--parameters", "1e6", "--workers", "2,4", "--latency", "0ms", "--exchange", "dense,gtopk")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "Step time, bytes sent by the busiest worker, scaling efficiency:"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in cells] == ["2", "4"]
    assert [row[2] for row in cells] == ["4 MB", "6.01 MB"]  # with the headers of 6 x 8 slices
    seconds = [float(row[1].removesuffix(" ms")) / 1e3 for row in cells]
    assert seconds[0] == pytest.approx(0.5 + 4e6 / 12.5e6, rel=0.03)
    assert seconds[1] == pytest.approx(0.5 + 6e6 / 12.5e6, rel=0.03)
    assert "Use gtopk at density 0.001 with 4 workers: a step takes" in done.output


def test_groups_of_up_to_64_workers_are_planned_by_default_and_the_smallest_is_recommended_first() -> None:
    assert {workers for _, workers in figures("--parameters", "1e6")} == {2, 4, 8, 16, 32, 64}
    lines = run("--parameters", "1e6").output.splitlines()
    recommended = [line.split(":")[0] for line in lines if line.startswith("Use ")]
    assert [line.split(" with ")[1] for line in recommended] == ["2 workers", "64 workers"]


@pytest.mark.parametrize(
    "options", [("--workers", "2"), ("--stages", "2"), ("--stages", "2", "--layers", "4")]
)
def test_an_assumed_time_to_compute_is_named(options: tuple[str, ...]) -> None:
    assumed = "Assumed: a step takes 0.5 s to compute; specify your model's time with --compute.\n"
    assert run("--parameters", "1e6", *options).output.endswith(assumed)
    assert "Assumed" not in run("--parameters", "1e6", *options, "--compute", "0.5s").output


def test_the_memory_of_a_worker_is_shown_for_each_exchange() -> None:
    """16 bytes for model and AdamW, 4 for the flat gradient, 8 for a residual, 4 for local steps."""
    usual = ("--parameters", "1e6", "--workers", "2,4", "--exchange", "dense,topk", "--density", "0.01")
    shown = run(*usual).output.splitlines()
    start = next(n for n, line in enumerate(shown) if line.endswith("with --optimizer adamw (assumed):"))
    dense = "parameter 4, gradient 4, optimizer 8, flat gradient 4, exchange 4, state 12, checkpoint 12"
    assert shown[start + 1] == f"  dense 48 (48 MB): {dense}"
    assert shown[start + 2].startswith(
        "  topk 191 (191 MB): parameter 4, gradient 4, optimizer 8, flat gradient 4, "
    )
    assert "residual 8, update log 134, exchange 0.96, state 12, checkpoint 16" in shown[start + 2], (
        "512 steps of 40,000 entries"
    )
    found = figures(*usual, "--local-steps", "5")["dense", 4]["memory_bytes_per_parameter"]
    assert found["local_steps"] == 4 and found["state"] == 4 and found["checkpoint"] == 12
    assert sum(found.values()) == 44


@pytest.mark.parametrize(
    ("described", "given", "optimizer", "nbytes"),
    [
        ("SGD(lr=0.1, momentum=0.9)", (), "sgd-momentum", 4),
        ("SGD(lr=0.1)", (), "sgd", 0),
        ("SGD(lr=0.1, momentum=0, nesterov=False)", (), "sgd", 0),
        ("SGD(dampening=0.1, lr=0.1, momentum=0.0)", (), "sgd", 0),
        ("SGD(lr=0.1, momentum=0.05)", (), "sgd-momentum", 4),
        ("AdamW(lr=0.1) and 1 more group, settings 1a2b", (), "adamw", 8),
        ("Muon(lr=0.1)", (), "adamw (assumed)", 8),
        ("SGD(lr=0.1)", ("--optimizer", "rmsprop"), "rmsprop", 4),
        ("SGD(lr=0.1) + SGD(lr=0.1, momentum=0.9)", (), "sgd-momentum", 4),
        ("SGD(lr=0.1, momentum=0.9) + AdamW(lr=0.1) and 1 more group, settings 1a2b", (), "adamw", 8),
        ("Muon(lr=0.1) + SGD(lr=0.1)", (), "adamw (assumed)", 8),
        ("SGD(lr=0.1) + SGD(lr=0.1, mom... 0123456789ab", (), "adamw (assumed)", 8),
    ],
)
def test_the_memory_is_that_with_the_optimizer_of_the_run_or_the_option(
    monkeypatch: pytest.MonkeyPatch, described: str, given: tuple[str, ...], optimizer: str, nbytes: int
) -> None:
    monkeypatch.setattr("gridtrain.cli.status.client_for", lambda invitation, run, state: Client())
    monkeypatch.setitem(STATUS["facts"], "optimizer", described)
    usual = ("--coordinator", "gridtrain1:x", "--exchange", "dense", *given)
    output = run(*usual).output
    assert f"in float32, with --optimizer {optimizer}:" in output
    assert ("AdamW" in output) == (not optimizer.startswith("sgd")), "local steps are for other optimizers"
    assert figures(*usual)["dense", 4]["memory_bytes_per_parameter"]["optimizer"] == nbytes


@pytest.mark.parametrize(
    ("exchange", "given", "nbytes"),
    [
        ("GTopK(density=0.01, momentum=0.9, values=fp16)", (), 16),
        ("GTopK(density=0.01, momentum=0.0, values=fp16)", (), 8),
        ("GTopK(density=0.01, momentum=0.0, values=fp16)", ("--momentum",), 16),
        ("LocalSteps(every=8, exchange=GTopK(density=0.01, momentum=0.0, values=fp16))", ("--momentum",), 8),
    ],
)
def test_the_memory_includes_the_momentum_of_a_sparse_exchange(
    monkeypatch: pytest.MonkeyPatch, exchange: str, given: tuple[str, ...], nbytes: int
) -> None:
    monkeypatch.setattr("gridtrain.cli.status.client_for", lambda invitation, run, state: Client())
    monkeypatch.setitem(STATUS["facts"], "exchange", exchange)
    found = figures("--coordinator", "gridtrain1:x", "--exchange", "dense,topk,gtopk", *given)
    residuals = [each["memory_bytes_per_parameter"]["residual"] for each in found.values()]
    assert residuals == [0, nbytes, nbytes]


@pytest.mark.parametrize("option", ["--link", "--latency", "--compute", "--optimizer"])
def test_the_error_of_a_value_names_its_option(option: str) -> None:
    done = run("--parameters", "1M", option, "5")
    assert done.exit_code == 2 and f"Invalid value for '{option}'" in done.output


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_a_narrow_terminal_gets_several_tables_and_whole_figures(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("gridtrain.cli.output.PLAIN_WIDTH", width)
    done = run("--parameters", "25.6M", "--workers", "2,1024")
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, lines)) <= width and not any("\u2026" in line for line in lines)
    heads = [line for line in lines if "workers" in line]
    assert len(heads) == {40: 4, 80: 2, 100: 2, 200: 1}[width]
    assert all(name in "".join(heads) for name in ("dense", "topk", "gtopk", "star"))


def test_figures_scale_with_the_number_of_workers() -> None:
    found = figures("--parameters", "25.6M", "--workers", "2..64", "--exchange", "dense,topk,gtopk,star")
    assert {workers for _, workers in found} == {2, 4, 8, 16, 32, 64}
    grows = {name: found[name, 64]["exchange_s"] / found[name, 8]["exchange_s"] for name in ("dense", "star")}
    assert grows["dense"] < 1.2
    assert grows["star"] == pytest.approx(63 / 7, rel=0.1)
    # A butterfly of 64 and one of 32 send 6 and 5 payloads, the direct exchange of 8 sends 2 * 7/8.
    assert found["gtopk", 64]["sent_bytes"] == pytest.approx(6 / 5 * found["gtopk", 32]["sent_bytes"])
    assert found["gtopk", 64]["sent_bytes"] == pytest.approx(
        6 / 1.75 * found["gtopk", 8]["sent_bytes"], rel=0.01
    )
    assert found["topk", 64]["sent_bytes"] == pytest.approx(9 * found["topk", 8]["sent_bytes"], rel=0.01)
    for each in found.values():
        assert each["efficiency"] == pytest.approx(0.5 / each["step_s"])
        assert each["speedup"] == pytest.approx(each["workers"] * each["efficiency"])


def test_billions_of_parameters_are_written_with_b_or_g() -> None:
    found = [
        figures("--parameters", text, "--workers", "2,4", "--exchange", "gtopk")
        for text in ("7B", "7G", "7e9")
    ]
    assert found[0] == found[1] == found[2]


def test_link_density_values_and_local_steps_change_the_figures() -> None:
    base = ("--parameters", "1M", "--workers", "8", "--exchange", "gtopk")
    usual = figures(*base)["gtopk", 8]
    assert figures(*base, "--link", "1Gbit")["gtopk", 8]["step_s"] < usual["step_s"]
    assert figures(*base, "--link", "100Mbit/10Mbit")["gtopk", 8]["step_s"] > usual["step_s"]
    assert figures(*base, "--density", "0.1")["gtopk", 8]["sent_bytes"] > 20 * usual["sent_bytes"]
    assert figures(*base, "--values", "int8")["gtopk", 8]["sent_bytes"] < usual["sent_bytes"]
    assert figures(*base, "--values", "int4")["gtopk", 8]["sent_bytes"] < 0.9 * usual["sent_bytes"]
    gathered = ("--parameters", "1M", "--workers", "8", "--exchange", "topk,star-gtopk", "--values")
    least, less = figures(*gathered, "int2"), figures(*gathered, "int4")
    assert all(least[each]["sent_bytes"] < less[each]["sent_bytes"] for each in less)
    refused = run(*base, "--values", "int2")
    assert refused.exit_code != 0 and "gtopk does not support" in f"{refused.output}{refused.exception}"
    tenth = figures(*base, "--local-steps", "10", "--density", "0.001")["gtopk", 8]
    assert tenth["step_s"] - 0.5 == pytest.approx((usual["step_s"] - 0.5) / 10)


def test_local_steps_are_proposed_for_the_target_share() -> None:
    """124 M parameters, four workers at 20 Mbit/s: a dense exchange takes minutes, a sparse one seconds."""
    slow_link = ("--parameters", "124M", "--link", "20Mbit", "--workers", "4", "--compute", "1s")
    both = (*slow_link, "--exchange", "dense,gtopk", "--density", "0.01")
    found = figures(*both)["gtopk", 4]
    every, overlapped = found["proposed_local_steps"], found["proposed_overlapped_local_steps"]
    assert 9 * (found["exchange_s"] - 1) < every < 9 * (found["exchange_s"] + 1) and overlapped < every / 5
    text = run(*both).output
    shown = "Local steps for 90% computing with 4 workers (in brackets: with overlap=True): dense over 512 ("
    assert shown in text and f", gtopk at density 0.01 {every} ({overlapped})." in text
    options = f'every={overlapped}, exchange=GTopK(density=0.01, values="fp16"), overlap=True'
    assert f"For AdamW and similar optimizers use LocalSteps({options}): 9" in text
    half = figures(*both, "--computing", "0.5")["gtopk", 4]
    assert half["proposed_local_steps"] == pytest.approx(every / 9, abs=1)
    assert run(*both, "--computing", "1").exit_code == 2
    thin = run("--parameters", "124M", "--link", "1Mbit", "--workers", "4", "--exchange", "dense").output
    assert "overlap=True): dense over 512 (over 512)." in " ".join(thin.split())
    assert "% computing; 90% would take more than 512." in " ".join(thin.split())


def test_without_a_slow_link_no_local_steps_are_proposed() -> None:
    text = run("--parameters", "1M", "--link", "1Gbit", "--workers", "4", "--compute", "2s").output
    assert "AdamW does not need them here: dense takes only a small part of each step." in text


def test_a_dense_exchange_is_recommended_up_to_some_local_steps() -> None:
    home = ("--parameters", "1M", "--workers", "4", "--compute", "0.1s", "--exchange", "dense,gtopk")
    dense = figures(*home, "--link", "20Mbit")["dense", 4]["proposed_overlapped_local_steps"]
    assert 16 < dense <= 32
    assert (
        f"LocalSteps(every={dense}, exchange=Dense(), overlap=True)" in run(*home, "--link", "20Mbit").output
    )
    slow = (*home, "--link", "5Mbit")
    proposed = 'exchange=GTopK(density={}, values="fp16"), overlap=True'
    assert proposed.format(0.03) in run(*slow).output, "the measured density"
    assert proposed.format(0.001) in run(*slow, "--density", "0.001").output
    assert "density 0.03 every 8 steps" in run(*slow, "--local-steps", "8").output
    more, less = (figures(*slow, *given)["gtopk", 4] for given in ((), ("--density", "0.001")))
    assert more["exchange_s"] == less["exchange_s"] and more["sent_bytes"] == less["sent_bytes"]
    assert more["proposed_local_steps"] > 3 * less["proposed_local_steps"]
    names = ("density", "proposed_local_steps_density")
    assert [each[name] for each in (more, less) for name in names] == [0.001, 0.03, 0.001, 0.001]
    assert [figures(*slow)["dense", 4][name] for name in names] == [1.0, 1.0]


def test_a_run_with_local_steps_is_planned_in_its_own_steps() -> None:
    facts = {"model": "2000000 parameters in 3 tensors"}
    local = "LocalSteps(every=8, exchange=Dense(), outer_learning_rate=1.0, outer_momentum=0.0)"
    live = network_from_status(STATUS | {"facts": facts | {"exchange": local}})
    assert live.local_steps == 8 and live.compute_s == pytest.approx(0.4 / 8)
    assert network_from_status(STATUS).local_steps == 1


def test_sites_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(SITES)
    described = read_network(path)
    network = described.network(8)
    assert [network.up_Bps[rank] for rank in (0, 5, 6, 7)] == [125e6, 125e6, 2.5e6, 2.5e6]
    assert network.link(0, 5).alpha_s == 0.0002
    assert network.link(0, 6).alpha_s == 0.015
    assert network.path_Bps(0, 6) == 6.25e6
    assert len([rate for rate in described.network(4).up_Bps if rate == 2.5e6]) == 1
    done = run("--parameters", "25.6M", "--network", str(path), "--exchange", "gtopk,dense")
    assert done.exit_code == 0, done.output
    assert "Use gtopk at density 0.001 with 8 workers" in done.output
    assert "For each exchange, members are ordered to minimize its predicted time." in done.output


def test_the_picture_has_a_line_for_each_exchange(tmp_path: Path) -> None:
    picture = tmp_path / "scaling.svg"
    done = run(
        "--parameters", "1M", "--workers", "2..16", "--exchange", "dense,gtopk", "--picture", str(picture)
    )
    assert done.exit_code == 0, done.output
    root = ElementTree.parse(picture).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("dense") == texts.count("gtopk") == 2
    assert "Scaling efficiency" in texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 4


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--parameters", "many"), "a number such as 25600000, 25.6e6, 25.6M or 7B"),
        (("--parameters", "1M", "--workers", "1..4"), 'not a list such as "2..64" or "2,3,8"'),
        (("--parameters", "1M", "--workers", "0..8"), 'not a list such as "2..64" or "2,3,8"'),
        (("--parameters", "1M", "--workers=-1..4"), 'not a list such as "2..64" or "2,3,8"'),
        (("--parameters", "1M", "--workers", "2..1000000"), 'not a list such as "2..64" or "2,3,8"'),
        (("--parameters", "1M", "--workers", "8..2"), 'not a list such as "2..64" or "2,3,8"'),
        (("--parameters", "1e400"), "is not between 1 and 1e+15"),
        (("--parameters", "0"), "is not between 1 and 1e+15"),
        (("--parameters", "1M", "--compute", "9" * 400 + "s"), "is not between 1e-9 s and 1e+06 s"),
        (("--parameters", "1M", "--compute", "0s"), "is not between 1e-9 s and 1e+06 s"),
        (
            ("--parameters", "1M", "--picture", "/nonexistent/x.svg"),
            "/nonexistent is not a writable folder",
        ),
        (("--parameters", "1M", "--network", __file__, "--link", "1Gbit"), "leave out --link and --latency"),
        (("--parameters", "1M", "--workers", "four"), 'not a list such as "2..64" or "2,3,8"'),
        (
            ("--parameters", "1M", "--exchange", "gossip"),
            "not a list of these exchanges: dense, dense-direct, topk",
        ),
        (("--parameters", "1M", "--workers", "4", "--picture", "x.svg"), "at least two numbers"),
    ],
)
def test_invalid_options_are_refused(arguments: tuple[str, ...], error: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert error in done.output


@pytest.mark.parametrize(("workers", "error"), [(1, "has 1 worker:"), (1_000_000, "has 1000000 workers:")])
def test_a_network_that_is_too_small_or_too_large_is_refused(
    workers: int, error: str, tmp_path: Path
) -> None:
    path = tmp_path / "n.toml"
    path.write_text(f"[[site]]\nname='a'\nlink='1Gbit'\nworkers={workers}")
    done = run("--parameters", "1M", "--network", str(path))
    assert done.exit_code == 2 and error in done.output
    assert run("--parameters", "1M", "--network", str(path), "--workers", "4").exit_code == 0


def test_all_members_of_a_large_run_count() -> None:
    links = [[a, a + 1, 0.004, 1e6] for a in range(31)]
    live = network_from_status({"run": "demo", "world_size": 300, "links": links})
    assert live.workers == 300
    assert live.description.startswith("300 members of")


def test_configuration_errors_have_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--parameters", "1M", "--latency", "soon"])
    assert ended.value.code == 2
    assert "'soon' is not a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "the names of the sites are []"),
        ("[[site]]\nname='a'\nlink='1Gbit'\ncolour='red'", "'colour' is not a known key"),
        ("[[site]]\nlink='1Gbit'", "a site has name = None"),
        ("[[site]]\nname='a'\nworkers=0\nlink='1Gbit'", "has workers = 0"),
        ("[[site]]\nname='a'\nup='1Mbit'", "has no link"),
        ("[[site]]\nname='a'\nlink='1Gbit'\n[[site]]\nname='b'\nlink='1Gbit'", 'the sites "a" and "b"'),
        ("[[site]]\nname='a'\nlink='1Gbit'\n[[between]]\nsites=['a','a']", "[[between]] of ['a', 'a']"),
        ("[[host]]\nname='a'", "'host' is not a known key"),
        ("[[site]]\nname='a'\nlink='1Gbit'\nup='1Mbit'", "has both a link and up or down"),
        ("[[site]]\nname='a'\nlink='100Mbit/'", "'' is not a rate"),
        ("[[site]]\nname='a'\nlink='0Mbit'", "n.toml: site \"a\": the rate '0Mbit' is less than"),
        ("[[site]]\nname='a'\nup='1Mbit'\ndown='fast'", "n.toml: site \"a\": 'fast' is not a rate"),
        (
            "[[site]]\nname='a'\nlink='1Gbit'\nlatency='-12ms'",
            "n.toml: site \"a\": '-12ms' is not a time",
        ),
        (
            "[[site]]\nname='a'\nlink='1Gbit'\n[[site]]\nname='b'\nlink='1Gbit'\n"
            "[[between]]\nsites=['a','b']\nlatency='-12ms'",
            "n.toml: [[between]] of ['a', 'b']: '-12ms' is not a time",
        ),
        (
            "[[site]]\nname='a'\nlink='1Gbit'\n[[between]]\nsites=[['a'],['b']]",
            "[[between]] of [['a'], ['b']]",
        ),
        ("site = " + "[" * 5000 + "]" * 5000, "lists are nested too deeply"),
        ("][", "Expected"),
    ],
)
def test_an_invalid_network_file_is_refused(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_network(path)
    assert error in str(refused.value) or error == "Expected"


STATUS = {
    "run": "demo",
    "world_size": 4,
    "facts": {"model": "2000000 parameters in 3 tensors", "exchange": "GTopK(density=0.01, values=fp32)"},
    "links": [[a, b, 0.004, 1e6 if 3 in (a, b) else 1e8] for a in range(4) for b in range(4) if a != b],
    "members": [{"rank": rank, "figures": {"computing_s": 0.1 + rank / 10}} for rank in range(4)],
}


class Client:
    """Stands for a client of a coordinator that answers with `STATUS`."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def status(self, timeout_s: float) -> dict[str, Any]:
        return STATUS


def test_links_are_read_from_a_running_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gridtrain.cli.status.client_for", lambda invitation, run, state: Client())
    found = figures("--coordinator", "gridtrain1:x", "--exchange", "gtopk,dense")
    assert set(found) == {("gtopk", 4), ("dense", 4)}
    assert found["dense", 4]["exchange_s"] > 2 * 3 / 4 * 8e6 / 1e6, "its slow link is in the ring"
    assert found["gtopk", 4]["efficiency"] == pytest.approx(0.4 / found["gtopk", 4]["step_s"])
    more = run("--coordinator", "gridtrain1:x", "--workers", "4,8")
    assert more.exit_code == 0 and "each further worker is assumed to equal a member" in more.output


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ({}, "has been measured yet"),
        ({"world_size": 1, "links": []}, "has been measured yet"),
        ({"world_size": 2, "links": [[0, 0, 0.1, None]]}, "contains the invalid link"),
        ({"world_size": 2, "links": ["nonsense"]}, "contains the invalid link"),
        ({"world_size": 2, "links": [[0, 1, -1.0, "fast"]]}, "has been measured yet"),
    ],
)
def test_a_status_without_links_is_refused(status: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        network_from_status(status)


def test_times_and_rates_are_parsed() -> None:
    seconds = [parse_seconds(text) for text in ("0.5s", "10ms", "200us", "1 s")]
    assert seconds == pytest.approx([0.5, 0.010, 0.0002, 1.0])
    described = single_site("100Mbit/20Mbit", "5ms")
    assert described.network(3).down_Bps == [12.5e6] * 3
    assert described.network(3).up_Bps == [2.5e6] * 3


def test_a_running_run_is_extrapolated_to_more_workers() -> None:
    """One of three members has a slow link; of six workers two have one, at neighbouring ranks."""
    trips = [[a, b, 0.002 if {a, b} == {0, 1} else 0.040, None] for a in range(3) for b in range(a + 1, 3)]
    rates = [[a, b, None, 1e6 if 2 in (a, b) else 1e8] for a in range(3) for b in range(3) if a != b]
    live = network_from_status({"run": "demo", "world_size": 3, "links": trips + rates})
    six = live.network(6)
    assert list(six.up_Bps) == [1e8, 1e8, 1e8, 1e8, 1e6, 1e6]
    assert [six.link(0, b).alpha_s for b in range(1, 6)] == [0.001, 0.001, 0.001, 0.020, 0.020]
    assert six.link(4, 5).alpha_s == 0.020, "as far apart as the slow member is from its nearest peer"
    assert six.path_Bps(0, 5) == six.path_Bps(5, 4) == 1e6
    assert live.network(2).size == 2 and live.network(3) is live.members
