"""A volunteer's rules at given times and sensor readings, without a clock or a sensor."""

from __future__ import annotations

import json
import math
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

from gridtrain.core.group.sensor_readings import SensorReadings
from gridtrain.core.messages import ends_with_resume
from gridtrain.errors import ConfigError
from gridtrain.testing import FakeSensors, FileSensors
from gridtrain_worker import budget as budget_module
from gridtrain_worker.budget import FILE, MAX_DAYS, Budget
from gridtrain_worker.sensors import MachineSensors
from gridtrain_worker.training_policy import KEYS, Rules, TrainingPolicy, parse_pairs

EVERYTHING = (
    "upload=20Mbit download=1Gbit budget=5GB hours=22:00-07:00,12:00-13:00 battery=pause gpu=pause idle=10m"
)
QUIET = SensorReadings(on_battery=False, gpu_used=False, idle_s=3600.0, temperature_C=40.0)


def at(clock: str, day: int = 2) -> datetime:
    return datetime.fromisoformat(f"2026-03-{day:02} {clock}")


def rules(*words: str) -> Rules:
    return Rules().with_settings(parse_pairs(words))


def said(controls: TrainingPolicy, readings: SensorReadings, clock: str = "12:30", moved: int = 0) -> str:
    return controls.decide(readings, moved, at(clock)).text()


@pytest.mark.parametrize("text", ["5GB", "500MB", "1500kB", "5000001B", "1TB"])
def test_a_budget_is_shown_as_it_is_written(text: str) -> None:
    assert rules(f"budget={text}").texts()["budget"] == text
    assert rules(f"budget={text}") == rules("budget=" + rules(f"budget={text}").texts()["budget"])


def test_without_rules_everything_is_allowed() -> None:
    assert said(TrainingPolicy(), SensorReadings()) == ""


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ("21:59", "outside its permitted hours, until 22:00"),
        ("22:00", ""),
        ("23:59", ""),
        ("00:00", ""),
        ("06:59", ""),
        ("07:00", "outside its permitted hours, until 12:00"),
        ("12:15", ""),
        ("13:00", "outside its permitted hours, until 22:00"),
    ],
)
def test_hours_can_include_midnight(clock: str, expected: str) -> None:
    assert said(TrainingPolicy(rules("hours=22:00-07:00,12:00-13:00")), SensorReadings(), clock) == expected


def test_the_last_window_of_today_is_over_and_tomorrows_is_named() -> None:
    decision = TrainingPolicy(rules("hours=08:00-09:00")).decide(SensorReadings(), 0, at("09:30"))
    assert decision.until == at("08:00", 3)
    midday = TrainingPolicy(rules("hours=12:00-24:00"))
    assert said(midday, SensorReadings(), "23:59") == "" and said(midday, SensorReadings(), "00:00").endswith(
        "12:00"
    )


@pytest.mark.parametrize(
    ("rule", "readings", "expected"),
    [
        ("battery=pause", SensorReadings(on_battery=True), "battery"),
        ("battery=pause", SensorReadings(on_battery=False), ""),
        ("battery=run", SensorReadings(on_battery=True), ""),
        ("gpu=pause", SensorReadings(gpu_used=True), "the GPU is in use"),
        ("idle=10m", SensorReadings(idle_s=599.0), "the computer is in use"),
        ("idle=10m", SensorReadings(idle_s=600.0), ""),
        ("temperature=80", SensorReadings(temperature_C=80.0), "too hot: 80 C; continues below 75 C"),
        ("temperature=80", SensorReadings(temperature_C=79.9), ""),
    ],
)
def test_each_sensor_pauses_the_script(rule: str, readings: SensorReadings, expected: str) -> None:
    assert said(TrainingPolicy(rules(rule)), readings) == expected


@pytest.mark.parametrize("rule", ["battery=pause", "gpu=pause", "idle=10m", "temperature=80"])
def test_a_sensor_that_cannot_be_read_pauses_the_script_with_its_name(rule: str) -> None:
    name, controls = rule.partition("=")[0], TrainingPolicy(rules(rule))
    gone = SensorReadings(absent={name: "its driver is gone"})
    assert said(controls, gone) == f'the "{name}" sensor cannot be read (its driver is gone)'
    assert controls.unreadable(gone) == {name: "its driver is gone"}
    assert controls.unreadable(QUIET) == {}


def test_the_temperature_has_two_limits() -> None:
    """C:  70   79   80 | 79   70 | 69   79   80
    run  run  pause......... | run  run  pause"""
    controls = TrainingPolicy(rules("temperature=80/70"))
    runs = [
        controls.decide(SensorReadings(temperature_C=c), 0, at("12:00")).may_train
        for c in (70, 79, 80, 79, 70, 69, 79, 80)
    ]
    assert runs == [True, True, False, False, False, True, True, False]


def test_a_gpu_that_was_used_a_moment_ago_is_still_in_use() -> None:
    controls, free = TrainingPolicy(rules("gpu=pause")), SensorReadings(gpu_used=False)
    assert said(controls, SensorReadings(gpu_used=True), "12:00:00") and said(controls, free, "12:00:29")
    assert said(controls, free, "12:00:30") == ""
    assert (
        said(controls, SensorReadings(gpu_used=True), "12:00:40") and said(controls, free, "11:00:00") == ""
    ), "clock"


def test_the_daily_traffic_budget_pauses_the_script() -> None:
    controls = TrainingPolicy(rules("budget=5GB"))
    assert said(controls, SensorReadings(), moved=4_999_999_999) == ""
    assert (
        said(controls, SensorReadings(), moved=5_000_000_000)
        == "the day's traffic budget is used up, until 00:00"
    )


def test_a_pause_on_request_lasts_until_it_is_ended_or_its_time() -> None:
    controls = TrainingPolicy()
    controls.pause()
    assert said(controls, QUIET) == "on request" and ends_with_resume("on request")
    controls.resume()
    assert said(controls, QUIET) == ""
    controls.pause(at("13:00"))
    assert said(controls, QUIET, "12:59") == "on request, until 13:00"
    assert ends_with_resume("on request, until 13:00")
    assert said(controls, QUIET, "13:00") == "" and not controls.is_paused


def test_the_owner_cannot_end_a_pause_for_which_a_rule_is_a_reason_too() -> None:
    controls = TrainingPolicy(rules("budget=1kB"))
    controls.pause(at("13:00"))
    both = said(controls, QUIET, moved=1000)
    assert both == "on request, the day's traffic budget is used up, until 00:00"
    assert not ends_with_resume(both)


def test_all_reasons_are_shown_and_a_time_only_if_all_have_one() -> None:
    controls = TrainingPolicy(rules("hours=22:00-07:00", "budget=1kB", "battery=pause"))
    both = said(controls, SensorReadings(on_battery=False), moved=1000)
    assert both == "outside its permitted hours, the day's traffic budget is used up, until 00:00"
    assert said(controls, SensorReadings(on_battery=True), moved=1000).endswith("used up, battery")


def test_rules_survive_being_written_and_read() -> None:
    every = rules(*EVERYTHING.split(), "temperature=80/70")
    assert set(every.texts()) == set(KEYS) and every.sensors == ("battery", "gpu", "idle", "temperature")
    assert Rules().with_settings(every.texts()) == every
    off = every.with_settings(dict.fromkeys(KEYS, "off"))
    assert off == Rules() and Rules().with_settings(Rules().texts()) == Rules() and off.hot_C == math.inf


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("batery=pause", "did you mean battery?"),
        ("x=1", "use one of upload, download"),
        ("battery=yes", "battery=pause or battery=run"),
        ("hours=25:00-07:00", "22:00-07:00"),
        ("hours=07:00-07:00", "shorter than a day"),
        ("budget=lots", "500MB"),
        ("budget=5", "500MB"),
        ("budget=-1", "500MB"),
        ("budget=0", 'or "off"'),
        ("budget=" + "9" * 400, "500MB"),
        ("hours=00:00-24:00", "shorter than a day"),
        ("idle=soon", "such as 10m"),
        ("temperature=80/90", "80/70"),
        ("temperature=500", "80/70"),
        ("upload=fast", "20Mbit"),
        ("nothing", "one of the keys"),
    ],
)
def test_an_invalid_rule_is_refused_with_valid_ones(word: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r" -> ") as refused:
        rules(word)
    assert expected in str(refused.value)


# -- the traffic of the day on the disk --------------------------------------------------------------


def add(folder: Path, nbytes: int, today: date) -> None:
    """Count bytes in a process of its own."""
    budget = Budget(folder)
    budget.add(nbytes, today)
    budget.keep()


def test_the_traffic_of_the_day_survives_a_restart(tmp_path: Path) -> None:
    today, tomorrow = date(2026, 3, 2), date(2026, 3, 3)
    add(tmp_path, 700, today)
    add(tmp_path, 50, today)
    assert Budget(tmp_path).today_bytes(today) == 750
    assert Budget(tmp_path).today_bytes(tomorrow) == 0
    add(tmp_path, 5, tomorrow)
    assert json.loads((tmp_path / FILE).read_text()) == {
        "day": "2026-03-03", "bytes": 5, "others": {"2026-03-02": 750},
    }  # fmt: skip


def test_a_clock_that_is_wrong_for_a_while_loses_no_traffic(tmp_path: Path) -> None:
    """A machine that starts in 1970 until its clock is set: the traffic of the day still counts."""
    today = date(2026, 3, 2)
    add(tmp_path, 700, today)
    add(tmp_path, 5, date(1970, 1, 1))
    assert Budget(tmp_path).today_bytes(today) == 700
    add(tmp_path, 50, today)
    assert json.loads((tmp_path / FILE).read_text()) == {
        "day": "2026-03-02", "bytes": 750, "others": {"1970-01-01": 5},
    }  # fmt: skip
    for day in range(1, 29):
        add(tmp_path, 1, date(2026, 2, day))
    assert len(json.loads((tmp_path / FILE).read_text())["others"]) == MAX_DAYS - 1


@pytest.mark.parametrize("piece_bytes", [5_000, 64 << 10, 3 << 20])
def test_a_crash_loses_little_traffic_and_few_pieces_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    today, now_s, writes, moved_bytes = date(2026, 3, 2), 0.0, 0, 0
    write = budget_module.replace_private_file

    def count_write(*args: Any, **options: Any) -> None:
        nonlocal writes
        writes += 1
        write(*args, **options)

    monkeypatch.setattr(budget_module, "replace_private_file", count_write)
    budget = Budget(tmp_path, lambda: now_s)
    for piece in range(1, 1001):
        now_s, moved_bytes = piece / 1024, moved_bytes + piece_bytes
        budget.add(piece_bytes, today)
        assert budget.today_bytes(today) == moved_bytes
        assert moved_bytes - Budget(tmp_path).today_bytes(today) < 1 << 20
    assert writes <= moved_bytes >> 20
    budget.add(1, today)
    now_s += 1.0
    budget.add(0, today)
    assert Budget(tmp_path).today_bytes(today) == moved_bytes + 1, "nor is it lost a second later"


def test_traffic_counted_by_an_older_version_counts(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"day": "2026-03-02", "bytes": 700}')
    assert Budget(tmp_path).today_bytes(date(2026, 3, 2)) == 700


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"day": "today", "bytes": 1}', '{"day": "2026-03-02", "bytes": -1}']
)
def test_a_malformed_file_is_no_empty_budget(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match="remove the file"):
        Budget(tmp_path)


# -- sensors -----------------------------------------------------------------------------------------


def test_fake_sensors_report_given_readings(tmp_path: Path) -> None:
    fake = FakeSensors(on_battery=False)
    assert fake.read(()) == SensorReadings(
        on_battery=False,
        absent=dict.fromkeys(("gpu", "idle", "temperature"), "the fake sensors have no such reading"),
    )
    fake.say(on_battery=True, idle_s=3)
    assert (fake.read(()).on_battery, fake.read(()).idle_s) == (True, 3.0)
    file = tmp_path / "sensors.json"
    file.write_text('{"temperature_C": 71.5}')
    assert FileSensors(file).read(()).temperature_C == 71.5
    for wrong in ('{"temperature": 1}', '{"on_battery": 1}', "[", "[]"):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            FileSensors(file).read(())


def test_each_sensor_of_this_machine_has_a_reading_or_a_reason() -> None:
    readings = MachineSensors().read(())
    for name, value in (
        ("battery", readings.on_battery),
        ("gpu", readings.gpu_used),
        ("idle", readings.idle_s),
        ("temperature", readings.temperature_C),
    ):
        assert (value is None) == bool(readings.absent.get(name)), (name, readings)
