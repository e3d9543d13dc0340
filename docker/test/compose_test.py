"""`make compose-test`: runs compose.yaml with real containers, from the build to their removal.

    build -> coordinator + 4 workers on an internal network -> train -> docker kill one -> `up` restarts it
          -> SIGKILL inside another one -> its restart policy restarts it -> the end: four equal models

Nothing remains afterwards: containers, networks, volumes and images are named after this process's project.
If there is no container engine, the test is skipped with exit code 0.
Uses only the standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DOCKER = Path(__file__).resolve().parents[1]
WHEELS = DOCKER / "wheelhouse"
WORKERS = 4
STEPS = 1000
LINE = "20Mbit"  # each worker's limit, up and down, so that a fast machine does not finish too early
BASE = "python:3.11-slim"
MAX_COORDINATOR_MB = 150.0

ASK_S, COMMAND_S, BUILD_S, UP_S = 20.0, 120.0, 3600.0, 300.0
FAULT_S = 180.0
"""How long the group may take to continue without a killed worker, and then to be complete again."""
TRAIN_S = 900.0
LOOK_S = 0.5
FURTHER = 60
"""Steps that must be committed after a change before the group counts as training."""


class Failed(Exception):
    """An expected state was not reached, or a command failed."""


class Skipped(Exception):
    """The test cannot run here; the message is the reason."""


def run(command: Sequence[str], timeout_s: float, **options: Any) -> str:
    """Run a command; return its standard output.  Raises `Failed` if it fails or takes too long."""
    try:
        done = subprocess.run(
            command, timeout=timeout_s, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"`{' '.join(command)}` did not finish within {timeout_s:g} s") from None
    except OSError as error:
        raise Failed(f"`{command[0]}` cannot be started: {error.strerror}") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise Failed(f"`{' '.join(command)}` ended with {done.returncode}:\n{last}")
    return done.stdout


def docker(*arguments: str, timeout_s: float = COMMAND_S) -> str:
    return run(("docker", *arguments), timeout_s).strip()


def compose_command() -> tuple[str, ...]:
    """Return the compose command.  Raises `Skipped` if there is no container engine or compose program."""
    if shutil.which("docker") is None:
        raise Skipped("`docker` is not installed")
    try:
        docker("info", "--format", "{{.ServerVersion}}", timeout_s=ASK_S)
    except Failed as problem:
        raise Skipped(f"no container engine answers: {str(problem).splitlines()[-1]}") from None
    for command in (("docker", "compose"), ("docker-compose",)):
        try:
            run((*command, "version"), ASK_S)
        except Failed:
            continue
        return command
    raise Skipped("neither `docker compose` nor `docker-compose` is installed")


class Stack:
    """The containers of one test."""

    def __init__(self, compose: tuple[str, ...], torch_index: str | None) -> None:
        self.project = f"gridtrain-compose-test-{os.getpid()}"
        self._stages_before = build_stages()
        files = (DOCKER / "compose.yaml", DOCKER / "test" / "compose.yaml")
        named = [part for file in files for part in ("-f", str(file))]
        self._command = (*compose, "-p", self.project, *named, "--profile", "cpu")
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("GRIDTRAIN_")},
            "GRIDTRAIN_TAG": self.project,
            "GRIDTRAIN_PORT": "0",  # any free port of the host; nothing connects to it
            "GRIDTRAIN_DASHBOARD_PORT": "0",
            "GRIDTRAIN_MIN_WORKERS": str(WORKERS),
            "GRIDTRAIN_UPLOAD_LIMIT": LINE,
            "GRIDTRAIN_DOWNLOAD_LIMIT": LINE,
            "STEPS": str(STEPS),
        }
        if torch_index is not None:
            self._environment["TORCH_INDEX"] = torch_index
        if compose == ("docker-compose",):  # it does not support BuildKit
            self._environment |= {"COMPOSE_DOCKER_CLI_BUILD": "0", "DOCKER_BUILDKIT": "0"}

    def compose(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        return run((*self._command, *arguments), timeout_s, env=self._environment)

    def up(self, *arguments: str) -> None:
        """Start all services; services that are already running are left unchanged."""
        self.compose(
            "up", "--detach", "--no-build", "--no-recreate", "--scale", f"worker={WORKERS}", *arguments,
            timeout_s=UP_S,
        )  # fmt: skip

    def containers(self, service: str = "") -> list[str]:
        """Return the ids of running and stopped containers, by number; by default, those of all services."""
        labels = [f"label=com.docker.compose.project={self.project}"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        filters = [part for label in labels for part in ("--filter", label)]
        form = '{{.ID}} {{.Label "com.docker.compose.container-number"}}'
        lines = docker("ps", "--all", "--format", form, *filters).splitlines()
        return [line.split()[0] for line in sorted(lines, key=lambda line: line.split()[-1])]

    def networks(self) -> list[str]:
        own = f"label=com.docker.compose.project={self.project}"
        return docker("network", "ls", "--quiet", "--filter", own).split()

    def status(self) -> dict[str, Any]:
        """Return the output of `gridtrain status --json`; {} if the command fails."""
        try:
            (coordinator,) = self.containers("coordinator")
            found = json.loads(docker("exec", coordinator, "gridtrain", "status", "--json", timeout_s=ASK_S))
        except (Failed, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def json_lines(self, container: str) -> list[dict[str, Any]]:
        """Return the JSON lines that the training script printed."""
        lines = run(("docker", "logs", container), COMMAND_S).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def losses(self) -> list[tuple[int, float]]:
        """Return (step, held-out loss) from whichever worker was the first one at each step."""
        lines = [line for container in self.containers("worker") for line in self.json_lines(container)]
        return sorted((line["step"], line["loss"]) for line in lines if "loss" in line)

    def log_tails(self) -> str:
        """Return the last lines of each container's log, for diagnosis."""
        texts = []
        for container in self.containers():
            done = subprocess.run(
                ("docker", "logs", "--tail", "15", container),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_S, check=False,
            )  # fmt: skip
            name, state = state_of(container, "{{.Name}} {{.State.Status}}").split()
            texts.append(f"-- {name} ({state})\n{done.stdout}")
        return "\n".join(texts)

    def remove(self) -> None:
        """Remove everything.  Raises `Failed` if something remains."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")
        form = ("--format", "{{.Repository}}:{{.Tag}}")  # by name, because an image may have several
        if tags := docker("images", *form, "--filter", f"reference=*:{self.project}*").split():
            docker("rmi", *tags)
        if stages := build_stages() - self._stages_before:
            docker("rmi", *sorted(stages))
        own = f"label=com.docker.compose.project={self.project}"
        left = {
            "containers": self.containers(),
            "volumes": docker("volume", "ls", "--quiet", "--filter", own).split(),
            "networks": self.networks(),
        }
        if any(left.values()):
            raise Failed(f"not everything could be removed: {left}")


def build_stages() -> set[str]:
    """Return the ids of the unnamed images that builds leave as a cache."""
    filters = ("--filter", "dangling=true", "--filter", "label=org.gridtrain.stage=build")
    return set(docker("images", "--quiet", *filters).split())


def state_of(container: str, form: str) -> str:
    return docker("inspect", "--format", form, container).lstrip("/")


def until(what: str, seen: Callable[[], bool], limit_s: float, shown: Callable[[], object]) -> None:
    """Poll until `seen()` is true.  Raises `Failed` with the current state after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not seen():
        if time.monotonic() > deadline_s:
            raise Failed(f"not seen within {limit_s:g} s: {what}; instead: {shown()}")
        time.sleep(LOOK_S)


class Play:
    """The faults and checks of the test, one method for each."""

    def __init__(self, stack: Stack, tell: Callable[[str], None]) -> None:
        self._stack = stack
        self._tell = tell
        self._picture: dict[str, Any] = {}

    def _look(self) -> dict[str, Any]:
        self._picture = self._stack.status() or self._picture
        return self._picture

    def _shown(self) -> str:
        now = self._picture
        return (
            f"{now.get('phase')}, {now.get('reason')}; generation {now.get('generation')}, "
            f"{now.get('world_size')} workers, step {now.get('step')}"
        )

    def trains(self, world_size: int, beyond: int, limit_s: float, generation: int = 0) -> None:
        """Wait until a group of this size has reached step `beyond`, in a generation after `generation`.

        Raises `Failed` after `limit_s`.
        """

        def seen() -> bool:
            now = self._look()
            return (
                now.get("phase") == "training" and now["reason"].startswith(f"{world_size} workers since ")
                and now["step"] >= beyond and now["generation"] > generation
            )  # fmt: skip

        until(f"{world_size} workers beyond step {beyond}", seen, limit_s, self._shown)

    def step(self) -> int:
        return int(self._look().get("step", 0))

    def loss(self) -> tuple[int, float]:
        """Return the latest (step, loss)."""
        return self._stack.losses()[-1]

    def check_isolation(self) -> None:
        (network,) = self._stack.networks()
        if docker("network", "inspect", "--format", "{{.Internal}}", network) != "true":
            raise Failed(f"the network {network} is not internal")
        answer = docker("exec", self._stack.containers("worker")[0], "python", "-c", DIAL_OUT)
        if not answer.startswith("not reached"):
            raise Failed(f"a worker reaches addresses outside the internal network: {answer}")
        self._tell(f"the network is internal; from a worker, {OUTSIDE[0]} is {answer}")

    def kill_by_engine(self) -> None:
        """Kill a worker with `docker kill`, which disables the restart policy, and restart it with `up`."""
        victim = self._stack.containers("worker")[1]
        before, generation = self.step(), int(self._picture["generation"])
        docker("kill", victim)
        self._tell(f"docker kill {name_of(victim)} at step {before}, loss {self.loss()[1]}")
        self.trains(WORKERS - 1, before + FURTHER, FAULT_S, generation)
        self._tell(f"{WORKERS - 1} workers continue: {self._shown()}")
        generation = int(self._picture["generation"])
        self._stack.up()
        self.trains(WORKERS, self.step() + FURTHER, FAULT_S, generation)
        self._tell(f"after `up` it returned: {self._shown()}, loss {self.loss()[1]}")

    def kill_by_signal(self) -> None:
        """Kill a worker with SIGKILL, as the kernel does when memory runs out, and wait until its restart
        policy restarts it."""
        victim = next(c for c in self._stack.containers("worker") if self._is_latest_first(c))
        before, generation = self.step(), int(self._picture["generation"])
        with suppress(Failed):  # this command ends together with the container
            docker("exec", victim, "python", "-c", KILL_THE_AGENT)
        self._tell(f"SIGKILL to the agent in {name_of(victim)}, the first worker, at step {before}")

        def restarted() -> bool:
            return int(state_of(victim, "{{.RestartCount}}")) >= 1

        until("a restart by its policy", restarted, FAULT_S, lambda: state_of(victim, "{{json .State}}"))
        self.trains(WORKERS, before + FURTHER, FAULT_S, generation)
        self._tell(f"its restart policy restarted it: {self._shown()}, loss {self.loss()[1]}")

    def _is_latest_first(self, container: str) -> bool:
        latest = self.loss()[0]
        lines = self._stack.json_lines(container)
        return any(line.get("step") == latest and "loss" in line for line in lines)

    def check_equal_models(self) -> None:
        workers = self._stack.containers("worker")

        def ended() -> bool:
            return all(state_of(worker, "{{.State.Status}}") == "exited" for worker in workers)

        until(f"the end of the run at step {STEPS}", ended, TRAIN_S, lambda: (self._look(), self._shown())[1])
        codes = {name_of(worker): state_of(worker, "{{.State.ExitCode}}") for worker in workers}
        if set(codes.values()) != {"0"}:
            raise Failed(f"not all workers exited with 0: {codes}")
        finals = [self._stack.json_lines(worker)[-1] for worker in workers]
        if len(finals) != WORKERS or {final.get("step") for final in finals} != {STEPS}:
            raise Failed(f"not all workers reached step {STEPS}: {finals}")
        models = {final["model"] for final in finals}
        if len(models) != 1:
            raise Failed(f"the models differ: {finals}")
        self._tell(f"all {WORKERS} ended at step {STEPS} with exit code 0 and the model {models.pop()[:16]}")


OUTSIDE = ("1.1.1.1", 443)  # an address on the internet
DIAL_OUT = f"""
import socket
try:
    socket.create_connection({OUTSIDE}, timeout=3).close()
    print("reached")
except OSError as error:
    print("not reached:", error)
"""

KILL_THE_AGENT = """
import os, pathlib, signal
for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):  # the agent is the only child of init
    text = stat.read_text()
    if text.rpartition(")")[2].split()[1] == "1" and "gridtrain" in text:
        os.kill(int(text.split()[0]), signal.SIGKILL)
"""


def name_of(container: str) -> str:
    number = '{{index .Config.Labels "com.docker.compose.container-number"}}'
    return f"worker {state_of(container, number)}"


def sizes(stack: Stack, tell: Callable[[str], None]) -> None:
    """Report the sizes of the images.  Raises `Failed` if the coordinator's image is too large."""
    size_MB = {
        image: int(docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6
        for image in (BASE, f"gridtrain-coordinator:{stack.project}", f"gridtrain-worker:{stack.project}")
    }
    base_MB, coordinator_MB, worker_MB = size_MB.values()
    tell(
        f"{BASE} {base_MB:.0f} MB; beyond it: coordinator {coordinator_MB - base_MB:.0f} MB, "
        f"worker {worker_MB - base_MB:.0f} MB"
    )
    if coordinator_MB - base_MB > MAX_COORDINATOR_MB:
        raise Failed(f"the coordinator's image is more than {MAX_COORDINATOR_MB:g} MB larger than its base")


def check_losses(losses: list[tuple[int, float]], at_kill: float, tell: Callable[[str], None]) -> None:
    """Report the losses.  Raises `Failed` unless the loss fell both before and after a worker was killed.

    Args:
        losses: the (step, held-out loss) of the whole run.
        at_kill: the loss before the first worker was killed.
    """
    first, last = losses[0], losses[-1]
    shown = losses[:: max(1, len(losses) // 10)]
    tell("held-out loss " + ", ".join(f"{loss:.2f} ({step})" for step, loss in [*shown, last]))
    if not last[1] < at_kill < first[1]:
        raise Failed(
            f"the loss did not keep falling: {first[1]}, {at_kill} at the kill, {last[1]} at the end"
        )


@contextmanager
def wheels_of(folder: Path | None) -> Iterator[None]:
    """Copy the wheels in `folder`, if it is given, to where builds look for them; remove the copies
    afterwards."""
    copied: list[Path] = []
    try:
        for wheel in sorted(folder.glob("*.whl")) if folder is not None else ():
            place = WHEELS / wheel.name
            if not place.exists():
                copied.append(place)
                shutil.copyfile(wheel, place)
        yield
    finally:
        for place in copied:
            place.unlink(missing_ok=True)


def test(stack: Stack, wheelhouse: Path | None, tell: Callable[[str], None]) -> None:
    with wheels_of(wheelhouse):
        tell("building the images")
        stack.compose("build", "coordinator", "worker", timeout_s=BUILD_S)
    sizes(stack, tell)
    stack.up()
    tell(f"up: a healthy coordinator, an invitation, {WORKERS} workers")
    play = Play(stack, tell)
    play.trains(WORKERS, 150, UP_S)
    tell(f"they train: step {play.step()}, loss {play.loss()[1]}")
    play.check_isolation()
    at_kill = play.loss()[1]
    play.kill_by_engine()
    play.kill_by_signal()
    play.check_equal_models()
    check_losses(stack.losses(), at_kill, tell)


def removed(stack: Stack, tell: Callable[[str], None]) -> int:
    """Remove the containers; return the exit code, 0 if everything was removed."""
    try:
        stack.remove()
    except Failed as problem:
        tell(f"FAILED to remove everything: {problem}")
        return 1
    tell("removed: no container, volume, network or image is left")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheelhouse", type=Path, help="a folder of wheels for the builds")
    parser.add_argument("--torch-index", help='where torch comes from; "" is the package index itself')
    parser.add_argument("--keep", action="store_true", help="keep containers and images")
    chosen = parser.parse_args()
    started_s = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - started_s:6.1f} s] {line}", flush=True)

    try:
        compose = compose_command()
    except Skipped as reason:
        print(f"compose-test SKIPPED: {reason}")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    stack = Stack(compose, chosen.torch_index)
    engine = docker("info", "--format", "{{.ServerVersion}}, {{.NCPU}} CPU cores")
    tell(f"{' '.join(compose)}, engine {engine}, project {stack.project}")
    code = 1
    try:
        test(stack, chosen.wheelhouse, tell)
        code = 0
    except Failed as problem:
        tell(f"FAILED: {problem}\n{stack.log_tails()}")
    finally:
        if not chosen.keep:
            code = max(code, removed(stack, tell))
    tell("compose-test passed" if code == 0 else "compose-test FAILED")
    return code


if __name__ == "__main__":
    sys.exit(main())
