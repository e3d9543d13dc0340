"""`gridtrain demo`: its help costs no torch, and a wrong option is explained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gridtrain.cli import main as cli_main
from gridtrain.cli.demo import demo
from gridtrain.errors import GridtrainError
from gridtrain.tools.demo import main
from gridtrain.tools.demo.orchestrator import DemoPlan


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[DemoPlan]:
    """The plans that the command would have run."""
    seen: list[DemoPlan] = []
    monkeypatch.setattr(main, "run_demo", lambda plan, console: seen.append(plan))
    return seen


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(demo, ["--help"])

    for option in ("workers", "cap", "density", "model", "steps", "exchanges", "out", "quick"):
        assert f"--{option}" in result.output, option


def test_by_default_gtopk_has_more_steps_than_dense(plans: list[DemoPlan]) -> None:
    assert CliRunner().invoke(demo, []).exit_code == 0

    assert plans == [DemoPlan(runs=(("dense", 250), ("gtopk", 450)), out=Path("demo-results"))]


def test_options_reach_the_plan(plans: list[DemoPlan]) -> None:
    options = ["--workers", "2", "--cap", "5Mbit", "--density", "0.01", "--exchanges", "gtopk,topk"]
    CliRunner().invoke(demo, [*options, "--steps", "30", "--model", "medium", "--out", "elsewhere"])

    (plan,) = plans
    assert plan.runs == (("gtopk", 30), ("topk", 30))
    assert (plan.workers, plan.cap, plan.density, plan.model) == (2, "5Mbit", 0.01, "medium")
    assert plan.out == Path("elsewhere")


def test_the_quick_demo_is_small(plans: list[DemoPlan]) -> None:
    CliRunner().invoke(demo, ["--quick"])

    (plan,) = plans
    assert plan.model == "tiny" and plan.runs == (("dense", 25), ("gtopk", 45))


@pytest.mark.parametrize("value", ["dense,ring", "", "dense,dense"])
def test_an_unknown_exchange_lists_those_that_exist(plans: list[DemoPlan], value: str) -> None:
    result = CliRunner().invoke(demo, ["--exchanges", value])

    assert result.exit_code == 2 and "from dense, gtopk, topk" in " ".join(result.output.split())
    assert plans == []


def test_a_failure_is_one_text_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(plan: DemoPlan, console: object) -> None:
        raise GridtrainError(
            "worker-2 ended with exit code 1", remedy="see the complete logs in demo-results"
        )

    monkeypatch.setattr(main, "run_demo", failing)
    with pytest.raises(SystemExit) as ended:
        cli_main(["demo"])

    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "gridtrain: worker-2 ended with exit code 1 -> see the complete logs in demo-results\n"
    )


def test_ctrl_c_says_that_everything_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(plan: DemoPlan, console: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run_demo", interrupted)
    result = CliRunner().invoke(demo, [])

    assert (
        result.exit_code == 130 and "stopped by SIGINT; all processes of the demo have ended" in result.output
    )


def test_the_command_and_the_orchestrator_do_not_load_torch() -> None:
    code = (
        "import sys, gridtrain.cli.demo, gridtrain.tools.demo.main; "
        "raise SystemExit('torch was loaded' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
