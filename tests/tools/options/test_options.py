"""Flags > GRIDTRAIN_* > run.toml > defaults, from one table; unknown names are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gridtrain.config import ENV_PREFIX, JoinConfig
from gridtrain.errors import ConfigError
from gridtrain.tools.options import PROGRAMS, Option, OptionKind, RunFile, resolve
from gridtrain.tools.options.option_table import (
    JOIN_OPTIONS,
    OTHER_VARIABLES,
    find_option,
    known_variables,
)
from gridtrain.tools.options.resolve import join_settings

ROOT = Path(__file__).resolve().parents[3]


def run_toml(text: str) -> RunFile:
    return RunFile.parse(text.encode(), Path("run.toml"))


LADDER = [
    # flag, environment, run.toml -> value, source, where
    ("1Mbit", "2Mbit", "3Mbit", "1Mbit", "flag", "--upload-limit"),
    (None, "2Mbit", "3Mbit", "2Mbit", "environment", "GRIDTRAIN_UPLOAD_LIMIT"),
    (None, None, "3Mbit", "3Mbit", "run.toml", "run.toml [worker] upload_limit"),
    (None, "", "3Mbit", "3Mbit", "run.toml", "run.toml [worker] upload_limit"),
    (None, None, None, "", "default", ""),
]


_FILE = f"[run.data]\nfile = 'x'\ndigest = 'sha256:{64 * 'a'}'\n"


@pytest.mark.parametrize(("flag", "variable", "toml", "value", "source", "where"), LADDER)
def test_flags_precede_variables_and_run_toml(
    flag: str | None, variable: str | None, toml: str | None, value: str, source: str, where: str
) -> None:
    environ = {} if variable is None else {"GRIDTRAIN_UPLOAD_LIMIT": variable}
    file = run_toml("" if toml is None else f'[worker]\nupload_limit = "{toml}"\n')
    found = resolve("worker", {"upload_limit": flag}, environ, file)["upload_limit"]
    assert (found.value, found.source, found.where) == (value, source, where)


def examples(one: Option) -> tuple[str, str, Any]:
    """The value as a text, in TOML, and as Python value."""
    if one.choices:
        return one.choices[-1], f'"{one.choices[-1]}"', one.choices[-1]
    match one.kind:
        case OptionKind.SWITCH:
            return "no", "false", False
        case OptionKind.COUNT:
            return "7", "7", 7
        case OptionKind.NUMBER:
            return "2.5", "2.5", 2.5
        case OptionKind.TEXTS:
            return " one  two", '["one", "two"]', ("one", "two")
        case _:
            return "/some/where", '"/some/where"', "/some/where"


@pytest.mark.parametrize(
    ("program", "one"), [(program, one) for program, options in PROGRAMS.items() for one in options]
)
def test_every_option_is_read_from_every_source(program: str, one: Option) -> None:
    text, toml, value = examples(one)
    table, key = one.toml_location(program)
    assert resolve(program, {one.name: value}, {}, RunFile())[one.name].source == "flag"
    by_variable = {one.variable: text}
    by_file = f"[{table}]\n{key} = {toml}\n"
    if one.is_command_line_only:
        with pytest.raises(ConfigError, match=f"'{key}' is not a known key"):
            run_toml(by_file)
        return
    found = resolve(program, {}, by_variable, RunFile())[one.name]
    assert (found.value, found.source) == (value, "environment")
    found = resolve(program, {}, {}, run_toml(by_file))[one.name]
    assert (found.value, found.source) == (value, "run.toml")
    if one.kind not in (OptionKind.TEXT, OptionKind.FOLDER, OptionKind.TEXTS) or one.choices:
        with pytest.raises(ConfigError, match=f"{one.variable} is 'dog'") as caught:
            resolve(program, {}, {one.variable: "dog"}, RunFile())
        assert caught.value.remedy.startswith("write ")
    with pytest.raises(ConfigError, match=rf"run.toml \[{table}\] {key}|\[run\] {key}") as caught:
        resolve(program, {}, {}, run_toml(f"[{table}]\n{key} = [1]\n"))
    assert caught.value.remedy.startswith("write ")


@pytest.mark.parametrize(
    ("toml", "words", "near"),
    [
        ("[cordinator]\n", "'cordinator' is not a known key", "did you mean 'coordinator'?"),
        ("[worker]\nupload-limit = '1Mbit'\n", r"\[worker\] 'upload-limit'", "did you mean 'upload_limit'?"),
        ("[coordinator]\nmin_worker = 2\n", r"\[coordinator\] 'min_worker'", "did you mean 'min_workers'?"),
        ("[run]\nscritp = 'train.py'\n", r"\[run\] 'scritp'", "did you mean 'script'?"),
        ("[run.data]\nfil = 'x'\n", r"\[run.data\] 'fil'", "did you mean 'file'?"),
        ("[worker]\nzzz = 1\n", r"\[worker\] 'zzz'", "use one of "),
        ("[worker]\nmin_workers = 1\n", r"\[worker\] 'min_workers'", "use one of "),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(toml: str, words: str, near: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run_toml(toml)
    assert caught.value.remedy.startswith(near)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("GRIDTRAIN_UPLOADLIMIT", "did you mean GRIDTRAIN_UPLOAD_LIMIT?"),
        ("GRIDTRAIN_DRY_RUN", ""),
        ("GRIDTRAIN_FOO", "unset GRIDTRAIN_FOO"),
        ("GRIDTRAIN_DEBUGG", "did you mean GRIDTRAIN_DEBUG?"),
        ("GRIDTRAIN_JOBS", "unset GRIDTRAIN_JOBS"),  # GRIDTRAIN_JOB is for compose files
        ("GRIDTRAIN_QQQQ", "unset GRIDTRAIN_QQQQ"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is set, but gridtrain has no such variable") as caught:
        resolve("worker", {}, {name: "x", "PATH": "/bin"}, RunFile())
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[run\n", "run.toml"),
        ("run = 1\n", "run is 1"),
        ("[run]\nscript = '../x.py'\n", "refers to '../x.py'"),
        ("[run]\nscript = '/x.py'\n", "refers to '/x.py'"),
        ("[run]\nfiles = ['a.py']\n", "but no script"),
        ("[run]\nscript = 'a.py'\ndigest = 'abc'\n", "digest is 'abc'"),
        ("[run]\nrequires = ['torch ; rm']\n", "requires 'torch ; rm'"),
        ("[run]\nabout = 'a\\nb'\n".replace("'", '"'), "about is"),
        ("[run.data]\nfile = 'x'\n", "has no digest"),
        ("[run]\nabout = 7\n", "about is 7 -> write one line of at most 512 characters, in quotes"),
        ("[run]\ndata = 3\n", "data is 3"),
        ("[run.data]\nindex = 'a'\nurl = 'b'\n", r"has index and url"),
        ("[run.data]\nindex = '../a'\n", r"\[run.data\] index refers to '../a'"),
        ("[run.data]\nfile = 3\n", r"\[run.data\] file is 3"),
        ("[run.data]\nfile = '/a'\n", r"\[run.data\] file refers to '/a'"),
        (f"{_FILE}url = 'https://h/x'\n", "has url = 'https://h/x' and bytes = 0"),
        (f"{_FILE}bytes = 3\n", "has url = '' and bytes = 3"),
        (f"{_FILE}url = 'h/x'\nbytes = 3\n", "has url = 'h/x'"),
        (f"{_FILE}url = 'file:///x'\nbytes = 3\n", "has url = 'file:///x'"),
        (f"{_FILE}url = 'https://h/x'\nbytes = '3'\n", "and bytes = '3'"),
        ("[coordinator]\nmin_workers = 0\n", "must be an integer >= 1"),
        ("[coordinator]\nmin_workers = true\n", "is True"),
        ("[coordinator]\nbackup_every = nan\n", "is nan"),
        ("[coordinator]\nbundle = 'yes'\n", "must be true or false -> write true or false, or leave it out$"),
    ],
)
def test_invalid_values_in_run_toml_are_refused(toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolve("coordinator", {}, {}, run_toml(toml))
    assert caught.value.remedy


@pytest.mark.parametrize(
    "name",
    [
        "a.py",
        "gridtrain/__init__.py",
        "__pycache__/a.cpython-311.pyc",
        "a.abi3.SO",
        "a.so.1.2",
        "a.sh",
    ],
)
def test_code_is_not_fetched_as_data(name: str) -> None:
    """It would be linked beside the script, and no volunteer could have read it before."""
    toml = f"[run]\nscript = 'train.py'\n{_FILE}url = 'https://h/x'\nbytes = 3\n"
    assert run_toml(toml.replace("'x'", "'corpus.py.txt'")).run.data is not None
    with pytest.raises(ConfigError, match=f"file is '{name}', which Python or a shell could run -> rename"):
        run_toml(toml.replace("'x'", f"'{name}'"))


@pytest.mark.parametrize("name", ["run.toml", "train", "sizes.json"])
def test_no_file_of_the_bundle_is_fetched(name: str) -> None:
    run = "[run]\nscript = 'train'\nfiles = ['sizes.json']\n"
    toml = f"{run}{_FILE}url = 'https://h/x'\nbytes = 3\n".replace("'x'", f"'{name}'")
    with pytest.raises(ConfigError, match=f"file is '{name}', which is also a file of the bundle -> rename"):
        run_toml(toml)
    assert run_toml(f"{run}{_FILE}").run.data is not None


def test_a_byte_order_mark_is_accepted_and_another_encoding_is_named() -> None:
    text = '[run]\nname = "mine"\n'
    assert RunFile.parse(text.encode("utf-8-sig"), Path("run.toml")) == run_toml(text)
    with pytest.raises(ConfigError, match=r"run.toml is not UTF-8 text -> save the file as UTF-8"):
        RunFile.parse(text.encode("utf-16"), Path("run.toml"))


def test_a_wrong_digest_of_a_data_file_is_not_to_be_removed() -> None:
    with pytest.raises(ConfigError, match=r"\[run.data\] digest is 'abc'") as caught:
        run_toml("[run.data]\nfile = 'x'\ndigest = 'abc'\n")
    assert "remove" not in caught.value.remedy and "sha256sum x" in caught.value.remedy


def test_the_file_is_found_and_its_folders_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[coordinator]\nstate = "state"\nbackup_to = "/abs"\n')
    for file in (RunFile.find({}, tmp_path), RunFile.find({"GRIDTRAIN_CONFIG": str(tmp_path / "run.toml")})):
        found = resolve("coordinator", {}, {}, file)
        assert (found.text("state"), found.text("backup_to")) == (str(tmp_path / "state"), "/abs")
    assert RunFile.find({}, tmp_path / "elsewhere") == RunFile()
    with pytest.raises(ConfigError, match="cannot be read"):
        RunFile.find({"GRIDTRAIN_CONFIG": str(tmp_path / "gone.toml")})
    (tmp_path / "run.toml").write_bytes(b"#" * 70_000)
    with pytest.raises(ConfigError, match="larger than"):
        RunFile.find({}, tmp_path)


def test_a_script_without_an_agent_has_the_same_configuration() -> None:
    file = run_toml('[worker]\nupload_limit = "3Mbit"\ncheckpoint_every = 50\nrelay = false\n')
    settings = {"name": "anna", "checkpoint_every": "70", "listen": None}
    found = join_settings(
        settings,
        {"GRIDTRAIN_EXPORT_DIR": "out", "GRIDTRAIN_UNENCRYPTED": "true", "GRIDTRAIN_WAIT": "auto"},
        file,
    )
    assert found == {
        "name": "anna", "upload_limit": "3Mbit", "checkpoint_every": "70", "export_dir": "out",
        "relay": "no", "unencrypted": "yes", "wait": "auto",
    }  # fmt: skip
    keys = {"coordinator": "tcp://x:1", "coordinator_key": "a" * 64, "identity": "i"}
    assert JoinConfig.from_environment({}, **keys, **found).relay == "no"


def test_join_accepts_the_options_of_the_table() -> None:
    import inspect

    from gridtrain.sdk.join import join

    taken = set(inspect.signature(join).parameters) - {"invitation"}
    assert taken == JOIN_OPTIONS.keys() - {"base", "donate_limit", "wait"}


def options_markdown(program: str) -> str:
    """The table of docs/configuration.md.

    A variable and a key of run.toml are named only where they do not follow from the flag:
    --upload-limit, GRIDTRAIN_UPLOAD_LIMIT, [worker] upload_limit.
    """
    lines = ["| flag | default | what it is |", "|---|---|---|"]
    for one in PROGRAMS[program]:
        if one.is_hidden:
            continue
        table, key = one.toml_location(program)
        flag = f"`{one.flag}`" + (f", `{one.off_flag}`" if one.off_flag else "")
        name = one.flag[2:].replace("-", "_")
        is_derived = one.variable == ENV_PREFIX + name.upper() and not one.has_no_flag
        others = [] if is_derived else [f"`{one.variable}`"]
        if (table, key) != (program, name) or one.has_no_flag:
            others.append(f"`[{table}] {key}`")
        if one.is_command_line_only:
            others = ["flag only"]
        cells = (
            "(the first argument)" if one.has_no_flag else flag,
            one.default_text,
            one.help + (f" ({', '.join(others)})" if others else ""),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_the_documented_table_is_current() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for program in PROGRAMS:
        table = options_markdown(program)
        assert table in text, f"docs/configuration.md lacks this table of {program}:\n\n{table}"
    for name, what in OTHER_VARIABLES.items():
        assert not what or f"`{name}`: {what}" in text


def test_only_separating_commas_split_a_value() -> None:
    """Hours of the day have commas between them, but are one rule."""
    hosts, rules = find_option("coordinator", "dashboard_hosts"), find_option("worker", "set")
    assert hosts.from_text("a,b, c", "there") == ("a", "b", "c")
    assert rules.from_text("hours=22:00-07:00,12:00-13:00 gpu=pause", "there") == (
        "hours=22:00-07:00,12:00-13:00", "gpu=pause",
    )  # fmt: skip
    assert resolve("worker", {"set": ()}, {"GRIDTRAIN_SET": "gpu=pause"}, RunFile()).texts("set") == (
        "gpu=pause",
    )


def test_names_of_variables_and_keys_follow_from_the_flag() -> None:
    one = find_option("worker", "upload_limit")
    assert (one.flag, one.variable, one.toml_location("worker")) == (
        "--upload-limit", "GRIDTRAIN_UPLOAD_LIMIT", ("worker", "upload_limit"),
    )  # fmt: skip
    assert find_option("coordinator", "run").toml_location("coordinator") == ("run", "name")
    assert {"GRIDTRAIN_UPLOAD_LIMIT", "GRIDTRAIN_CONFIG"} <= known_variables()
