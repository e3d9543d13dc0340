"""`gridtrain new`, followed by the commands that it prints: a coordinator and two workers that train."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from gridtrain.cli import new
from gridtrain.cli.main import cli
from gridtrain.cli.new import templates
from gridtrain.errors import ConfigError
from gridtrain.tools.bundle import Bundle
from gridtrain.tools.options import RunFile

WITHIN_S = 120.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a new user with `gridtrain` in its PATH and any free port."""
    program = tmp_path / "bin" / "gridtrain"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m gridtrain "$@"\n')
    program.chmod(0o755)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("GRIDTRAIN_", "COLUMNS"))
    }
    return inherited | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "GRIDTRAIN_LISTEN": "tcp://127.0.0.1:0",
        "TERM": "xterm",
    }


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def shell(
    stack: ExitStack, command: str, folder: Path, environment: dict[str, str], **streams: int
) -> subprocess.Popen[str]:
    """Start a command of `gridtrain` whose words a shell expands; forked, as a shell's child is not."""
    expanded = subprocess.run(
        ["/bin/sh", "-c", f"printf '%s\\0' {command}"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    program, *arguments = expanded.split("\0")[:-1]
    assert program == "gridtrain"
    process = subprocess.Popen(
        [sys.executable, "-m", "gridtrain", *arguments],
        cwd=folder,
        env=environment,
        text=True,
        **streams,  # type: ignore[call-overload]
    )

    def end() -> None:
        process.terminate()
        process.wait(WITHIN_S)

    stack.callback(end)
    return process


class Screen:
    """A terminal: its output and its keyboard."""

    def __init__(self, stack: ExitStack) -> None:
        self.master, self.slave = pty.openpty()
        stack.callback(os.close, self.master)
        self.seen = ""

    def until(self, word: str | None) -> str:
        """Reads until `word` is shown, or to the end if it is None."""
        until_s = time.monotonic() + WITHIN_S
        while word is None or word not in self.seen:
            assert time.monotonic() < until_s, f"no {word!r} in {self.seen!r}"
            try:
                piece = os.read(self.master, 1 << 16)
            except OSError:  # Linux: the other end is closed
                piece = b""
            if not piece:
                assert word is None, f"the output ended without {word!r}: {self.seen!r}"
                break
            self.seen += piece.decode(errors="replace")
        return self.seen

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


@pytest.mark.integration
def test_a_new_run_trains_by_copy_and_paste(
    tmp_path: Path, environment: dict[str, str], stack: ExitStack
) -> None:
    made = subprocess.run(
        ["gridtrain", "new", "my-run"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    cd, coordinate, work = (
        line[2:].split("  #")[0].strip() for line in made.splitlines() if line[:2] == "  "
    )
    assert (cd, coordinate) == ("cd my-run", "gridtrain coordinator")
    folder = tmp_path / "my-run"
    script = (folder / "train.py").read_text()
    (folder / "train.py").write_text(script.replace("STEPS = 10_000", "STEPS = 300"))  # as its owner might

    coordinator = shell(
        stack, f"{coordinate} --exit-when-finished", folder, environment,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert coordinator.stdout is not None
    greeting = [coordinator.stdout.readline() for _ in range(6)]  # one line is the dashboard's
    found = re.search(r"volunteers run: +train.py, (sha256:[0-9a-f]{64})", "".join(greeting))
    assert found is not None, greeting
    bundle = Bundle.from_run_file(RunFile.find({}, folder))
    assert bundle is not None and bundle.digest == found[1]

    screen = Screen(stack)
    environment["COLUMNS"] = "200"
    first = shell(
        stack, work, folder, environment, stdin=screen.slave, stdout=screen.slave, stderr=screen.slave
    )
    os.close(screen.slave)
    shown = screen.until("Run it on this machine? [y/N]")
    for word in ('The owner of the run "my-run"', "python train.py", found[1], "torch 2.6 or newer",
                 "gradients or parameter changes", "permissions of", "upload limit: none"):  # fmt: skip
        assert word in shown, word
    assert "of new images" not in shown
    screen.type("y\n")

    second = shell(
        stack, f"{work} --name bo --accept {found[1]} --export-dir {tmp_path / 'out'}", folder, environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    seen = screen.until(None)
    out, err = second.communicate(timeout=WITHIN_S)
    assert first.wait(WITHIN_S) == second.returncode == 0, f"{seen}\n{out}\n{err}"
    assert coordinator.wait(WITHIN_S) == 0

    accuracies = [float(text) for text in re.findall(r"step \d+: ([\d.]+) % of new images", seen + out)]
    assert len(accuracies) == 12 and accuracies[-1] > 80 and accuracies[-1] > accuracies[0] + 10
    assert re.search(r"step [\d,]+, 2 workers \| here: [\d,]+ steps, [\d,]+ samples", seen)
    thanks = re.search(r"thank you: ([\d,]+) steps, ([\d,]+) samples", seen)
    events = [json.loads(line) for line in err.splitlines() if line.startswith('{"ts"')]
    (contributed,) = (line["fields"] for line in events if line["event"] == "contributed")
    assert thanks is not None and contributed["steps"] == int(thanks[1]) == 300
    assert contributed["samples"] + int(thanks[2].replace(",", "")) == contributed["run_samples"]
    assert contributed["sent_bytes"] > 0 and contributed["received_bytes"] > 0


def test_existing_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    done = CliRunner().invoke(cli, ["new", str(tmp_path), "--name", "mine"])
    assert isinstance(done.exception, ConfigError) and "already contains train.py" in done.exception.reason
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


@pytest.mark.parametrize("below", ["second", "data/second"])
def test_a_run_is_not_created_inside_another_one(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(cli, ["new", str(tmp_path / "first")]).exit_code == 0
    monkeypatch.chdir(tmp_path / "first")
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(cli, ["new", below])
    assert isinstance(done.exception, ConfigError) and sorted(tmp_path.rglob("*")) == before
    assert str(done.exception) == (
        f"{below} would be inside the folder of another run, {tmp_path}/first -> choose a folder "
        f"outside it: gridtrain new {tmp_path}/first-2"
    )
    assert CliRunner().invoke(cli, ["new", f"{tmp_path}/first-2"]).exit_code == 0


@pytest.mark.parametrize(
    "arguments", [("",), ("", "--name", "x"), (".", "--name", ""), ("y", "--name", "a/b")]
)
def test_an_empty_or_invalid_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["new", *arguments])
    assert isinstance(done.exception, ConfigError) and done.exception.remedy and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["..", "-x", "a b"])
def test_a_folder_name_that_is_no_run_name_is_refused(tmp_path: Path, name: str) -> None:
    done = CliRunner().invoke(cli, ["new", "--", str(tmp_path / "x" / name)])
    if name == "..":
        assert done.exit_code == 0, "the parent folder has a valid name"
        return
    assert isinstance(done.exception, ConfigError) and "--name NAME" in done.exception.remedy


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(cli, ["new", str(tmp_path / "file" / "run")])
    assert isinstance(done.exception, ConfigError) and done.exception.remedy == "choose another folder"


def test_a_full_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text, run = Path.write_text, tmp_path / "my-run"

    def full(path: Path, text: str, encoding: str) -> int:
        write_text(path, "" if path.name == "train.py" else text, encoding)
        if path.name == "train.py":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return len(text)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        done = CliRunner().invoke(cli, ["new", str(run)])
    assert isinstance(done.exception, ConfigError) and "No space left on device" in done.exception.reason
    assert list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(cli, ["new", str(run)]).exit_code == 0


@pytest.mark.parametrize(
    ("template", "more_files", "requires", "workers"),
    [
        ("lora", {"generate.py", "text.txt"}, ["torch", "transformers", "peft"], "3"),
        ("pretrain", {"text.txt"}, ["torch", "transformers"], "2"),
        ("vision", set(), ["torch"], "2"),
    ],
)
def test_the_templates_are_complete(
    template: str, more_files: set[str], requires: list[str], workers: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(cli, ["new", str(tmp_path / "a-run"), "--template", template])
    assert done.exit_code == 0, done.output
    absent = [package for package in requires if find_spec(package) is None]
    assert (f"It needs {' and '.join(absent)}:\n  pip install" in done.output) == bool(absent)
    (files,) = [line for line in templates("a-run", template)["run.toml"].splitlines() if line[:5] == "files"]
    assert files.index("#") == 32, "in one column with the other comments"
    written = {path.name for path in (tmp_path / "a-run").iterdir()}
    assert written == {"train.py", "run.toml", "compose.yaml", "compose.volunteer.yaml"} | more_files
    file = RunFile.read(tmp_path / "a-run" / "run.toml")
    assert (file.run.name, file.run.script) == ("a-run", "train.py")
    assert [name for name, _ in file.run.requires] == requires
    assert str(file.tables["coordinator"]["min_workers"]) == workers
    assert not {"NAME", "ABOUT", "FILES", "REQUIRES", "MIN_WORKERS"} & set(
        re.findall(r"\b[A-Z_]+\b", (tmp_path / "a-run" / "run.toml").read_text())
    )
    for script in (tmp_path / "a-run").glob("*.py"):
        compile(script.read_text(), str(script), "exec")
    bundle = Bundle.from_run_file(RunFile.find({}, tmp_path / "a-run"))
    assert bundle is not None


@pytest.mark.parametrize(
    ("folder", "missing"),
    [
        ("", "adapter_config.json and no adapter_model.safetensors"),
        ("none", "adapter_config.json and no adapter_model.safetensors"),
        ("partial", "adapter_model.safetensors"),
    ],
)
def test_generate_names_what_an_adapters_folder_lacks(folder: str, missing: str, tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["new", str(tmp_path / "a-run"), "--template", "lora"]).exit_code == 0
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "adapter_config.json").write_text("{}")
    command = [sys.executable, "a-run/generate.py", *([folder] if folder else [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        f'generate.py: the folder "{folder or "."}" has no {missing}; give the folder that'
    )


@pytest.mark.parametrize(
    ("template", "missing", "packages"),
    [
        ("vision", ["torch"], ["[torch]"]),
        ("pretrain", ["transformers"], ["transformers>=4.57"]),
        ("pretrain", ["torch", "transformers"], ["[torch]", "transformers>=4.57"]),
        ("lora", ["peft"], ["[lora]"]),
        ("lora", ["transformers"], ["transformers>=4.57"]),
    ],
)
def test_what_is_missing_is_installed_and_no_more(
    template: str, missing: list[str], packages: list[str]
) -> None:
    command = shlex.split(new._install(new.TEMPLATES[template], missing))
    assert command[:2] == ["pip", "install"]
    installed = [word for word in command[2:] if word != "-e"]
    assert len(installed) == len(packages)
    assert all(word.endswith(package) for word, package in zip(installed, packages, strict=True)), command


@pytest.mark.parametrize("name", ["NAME", "ABOUT", "MIN_WORKERS", "MY_NAME-ABOUT.MIN_WORKERS"])
def test_placeholders_within_a_name_are_not_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(templates(name)["run.toml"])
    file = RunFile.read(tmp_path / "run.toml")
    assert file.run.name == name and file.tables["coordinator"]["min_workers"] == 2
    assert file.run.about == "a small network learns to recognize shapes in noisy images"


@pytest.mark.parametrize("name", ["compose.yaml", "compose.volunteer.yaml"])
def test_the_compose_files_are_valid(tmp_path: Path, name: str) -> None:
    """Checked by compose where it is installed, otherwise as YAML."""
    assert CliRunner().invoke(cli, ["new", str(tmp_path / "a-run")]).exit_code == 0
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "GRIDTRAIN_INVITATION": "gridtrain1:none",
    }
    for compose in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(compose[0]) is None:
            continue
        known = subprocess.run((*compose, "version"), capture_output=True, timeout=60, env=environment)
        if known.returncode == 0:
            for profile in ("cpu", "gpu"):
                done = subprocess.run(
                    (*compose, "-f", name, "--profile", profile, "config", "-q"),
                    cwd=tmp_path / "a-run", env=environment, capture_output=True, text=True, timeout=60,
                )  # fmt: skip
                assert (done.returncode, done.stderr) == (0, "")
            return
    yaml = pytest.importorskip("yaml", reason="there is neither compose nor a YAML parser here")
    services = yaml.safe_load((tmp_path / "a-run" / name).read_text())["services"]
    assert {"worker", "worker-gpu"} <= set(services)


def test_the_owners_containers_use_the_folder_and_share_the_invitation() -> None:
    """The coordinator reads the folder; its workers read the invitation and the accepted digest."""
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load(templates("a-run")["compose.yaml"])["services"]
    coordinator, worker = services["coordinator"], services["worker"]
    assert coordinator["working_dir"] == "/job" and ".:/job:ro" in coordinator["volumes"]
    assert not [volume for volume in worker["volumes"] if "/job" in volume]
    written = "".join(services["invitation"]["command"])
    for variable in ("GRIDTRAIN_INVITATION_FILE", "GRIDTRAIN_ACCEPT_FILE"):
        file = worker["environment"][variable]
        assert file in written and "invitations:/invitations:ro" in worker["volumes"]


def test_the_volunteers_compose_file_is_the_tested_one() -> None:
    tried = Path(__file__).resolve().parents[2] / "docker" / "compose.volunteer.yaml"
    if not tried.exists():
        pytest.skip("docker/compose.volunteer.yaml is not there")
    assert templates()[tried.name] == tried.read_text(encoding="utf-8"), (
        f"copy {tried} to gridtrain/tools/templates/new"
    )


@pytest.mark.parametrize("folder", ["new", "lora", "pretrain"])
def test_ctrl_c_while_a_template_imports_torch_prints_one_line(folder: str) -> None:
    """Under `gridtrain worker`, which forwards Ctrl-C, and whose variable gridtrain recognizes."""
    script = files("gridtrain.tools") / "templates" / folder / "train.py"
    program = (
        "import runpy, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    environment = {**os.environ, "GRIDTRAIN_COORDINATOR": "tcp://127.0.0.1:1"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.stderr == "gridtrain: interrupted; this worker is leaving the run\n"
