"""Results as JSON and tables; and the comparison of a quick bench with recorded figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import quick
from bench.bounds import bound_s
from bench.cells import parse
from bench.measurement import samples_of
from bench.quick import EXCHANGES, LOCAL, RECORD, compare, exchange_ratios, local_ratios
from bench.report import markdown
from bench.results import CellResult, Results, Sample
from record import machine
from rivals.contract import Result

DENSE = "dense P=4 n=25.6M rate=100Mbit"
GLOO = "gloo/all_reduce P=4 n=25.6M rate=100Mbit"
GTOPK = "gtopk P=4 n=25.6M rate=100Mbit density=0.001"


def result(text: str, *seconds: float, skipped: str = "", cpu_s: float = 0.5) -> CellResult:
    cell = parse(text)
    samples = [
        Sample(s, cpu_s, sent_bytes=2e6, payload_bytes=89_600.0, block=i % 2) for i, s in enumerate(seconds)
    ]
    return CellResult(cell, bound_s(cell), samples, skipped)


def recorded(*cells: CellResult) -> Results:
    made = {"date": "2026-11-21 20:00 UTC", "command": "python -m bench", "software": "0.1.0", "blocks": 2}
    return Results(made, {"cores": 2}, {"mpi": "there is no command 'mpirun'"}, list(cells))


def test_results_are_equal_after_writing_and_reading() -> None:
    results = recorded(result(DENSE, 13.0, 13.2, 14.0), result(GLOO, skipped="no torch"))
    assert Results.from_json(results.to_json()) == results


def test_the_statistics_of_a_cell() -> None:
    one = result(DENSE, 13.0, 12.5, 14.0, 13.5, 15.0)
    assert (one.median_s, one.least_s) == (13.5, 12.5)
    assert one.x_bound == pytest.approx(13.5 / 12.288)
    assert one.cpu_s_per_GB() == pytest.approx(0.5 / 0.1024)


def test_repeats_with_aborted_attempts_do_not_count() -> None:
    one = result(DENSE, 13.0, 99.0, 13.4)
    one.samples[1] = replace(one.samples[1], aborts=2, cpu_s=9.0)
    assert (one.median_s, one.cpu_s) == (13.2, 0.5)
    assert "| dense (1 repeats with aborted attempts, left out) | 13.200 s |" in markdown(recorded(one))
    one.samples = [one.samples[1]]
    assert one.median_s == 99.0
    assert "(1 repeats with aborted attempts, which is all of them)" in markdown(recorded(one))


def test_the_report_shows_all_cells() -> None:
    results = recorded(
        result(DENSE, 13.0, 13.2, 14.0), result(GTOPK, 0.039, 0.038, 0.05), result(GLOO, 13.4), result(
            "mpi/gtopk P=4 n=25.6M rate=100Mbit density=0.001", skipped="there is no command 'mpirun'"
        )
    )  # fmt: skip
    text = markdown(results)

    assert "## P = 4, 100Mbit, n = 25,600,000 (102.4 MB)" in text
    assert "| gloo/all_reduce | 13.400 s | 13.400 s | 13.400 s | 1.09 | 0.5000 |" in text
    assert "| mpi/gtopk | left out: there is no command 'mpirun' |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for table in text.split("\n\n"):
        widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(widths) <= 1, table
    assert rows


def test_the_report_notes_how_each_cell_was_measured() -> None:
    rival = result(GLOO, 13.4, 13.5)
    rival.samples = [replace(sample, note="torch 2.13.0; its own choice") for sample in rival.samples]
    rows = [line for line in markdown(recorded(rival, result(DENSE, 13.0))).splitlines() if "0.5000" in line]
    own, others = sorted(rows)
    assert own.startswith("| dense |") and own.endswith("| with the vote and its decision |")
    assert others.startswith("| gloo/all_reduce |") and others.endswith("| torch 2.13.0; its own choice |")


def test_a_rival_notes_its_version_and_its_algorithm() -> None:
    found = Result("mpi", "Open MPI 4.1.4", "all_reduce", 1000, 2, 0, [1.0], [0.5], [8.0], 4000)
    (sample,) = samples_of(found)
    assert sample == Sample(1.0, 0.5, 8.0, note=sample.note)
    assert sample.note == (
        "Open MPI 4.1.4; dense Allreduce of n float32 by ring, which is Open MPI's fastest here"
    )


def test_a_machine_is_described_without_a_name() -> None:
    import platform

    about = machine()
    assert about["cores"] >= 1 and about["memory_GiB"] > 0
    assert not [value for value in map(str, about.values()) if platform.node() and platform.node() in value]


# -- quick -----------------------------------------------------------------------------------------


def test_quick_reports_slower_figures() -> None:
    recorded_figures = {"select_ns": 10.0, "merge_ns": 100.0, "dense seconds": 1.0}
    now = {"select_ns": 13.6, "merge_ns": 134.0, "decode_ns": 4.0}
    found = compare(now, recorded_figures, {"dense seconds": "rivals not installed: gloo"})

    assert list(map(str, found)) == [
        "SLOWER        selection with the residual 13.6 copies (recorded 10, +36%, at most +35%)",
        "new           decode 4 copies",
        "fine          merge 134 copies (recorded 100, +34%, at most +35%)",
        "not measured  a dense exchange takes, of gloo's time,: rivals not installed: gloo",
    ]
    assert [finding.name for finding in found if finding.slower] == ["select_ns"]
    assert not [finding for finding in found if finding.better]


def test_quick_warns_if_figures_are_much_better_than_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "quick.json"
    figures = dict.fromkeys(("select_ns", "encode_ns", "merge_ns"), 10.0)
    path.write_text(json.dumps({"figures": figures}))
    monkeypatch.setattr(quick, "RECORD", path)
    now = {"select_ns": 7.3, "encode_ns": 7.5, "merge_ns": 10.0}
    monkeypatch.setattr(quick, "measured", lambda say: (now, {}))
    assert quick.main(keep=False) == 0
    output = capsys.readouterr().out
    assert "BETTER        selection with the residual 7.3 copies (recorded 10, -27%, at most +35%)" in output
    assert "fine          encode 7.5 copies" in output
    assert "1 of 3 figures are far better than the recorded ones, which detect less there: record" in output


def test_local_figures_are_ratios_to_a_copy() -> None:
    figures = {"copy_ns": 0.5, "select_ns": 5.0, "encode_ns": 10.0, "decode_ns": 20.0, "merge_ns": 100.0}
    assert local_ratios(figures) == {
        "select_ns": 10.0,
        "encode_ns": 20.0,
        "decode_ns": 40.0,
        "merge_ns": 200.0,
    }


def test_exchange_figures_are_ratios_to_gloo() -> None:
    where, small = "P=2 n=2M rate=1Gbit", "P=4 n=120k rate=1Gbit"
    dense, gtopk = result(f"dense {where}", 0.9, 0.6, cpu_s=0.4), result(f"gtopk {where}", 0.1)
    short = result(f"dense:topology=ring {small}", 0.03, 0.01, cpu_s=0.006)
    gloo = result(f"gloo/all_reduce {where}", 0.5, 0.7, cpu_s=0.2)
    small_gloo = result(f"gloo/all_reduce {small}", 0.02, cpu_s=0.002)
    ratios, reasons = exchange_ratios([dense, gtopk, gloo, short, small_gloo])
    assert ratios == pytest.approx(
        {"dense seconds": 1.2, "dense CPU": 2.0, "gtopk seconds": 0.2, "gtopk CPU": 2.5, "small dense CPU": 3}
    )
    assert reasons == {}

    missing = [result(f"gloo/all_reduce {place}", skipped="no torch") for place in (where, small)]
    ratios, reasons = exchange_ratios([dense, gtopk, short, *missing])
    assert ratios == {} and set(reasons.values()) == {"no torch"} and len(reasons) == 5


def test_the_recorded_figures_are_those_of_a_quick_bench() -> None:
    whole = json.loads(RECORD.read_text())
    assert whole["command"].startswith("python -m bench quick")
    assert set(whole["figures"]) == {*LOCAL, *EXCHANGES} and min(whole["figures"].values()) > 0
