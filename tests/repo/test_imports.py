"""Who may import whom (DESIGN section 4), read from the source with `ast`, function-level imports too.

Every file of the three packages is held against the longest row of `TABLE` that fits its name.  A
row always allows: the standard library, `gridtrain.errors`, `gridtrain.config`, `gridtrain._version`
and the package itself.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "gridtrain": ROOT / "gridtrain",
    "gridtrain_coordinator": ROOT / "coordinator" / "gridtrain_coordinator",
    "gridtrain_worker": ROOT / "worker" / "gridtrain_worker",
}

CORE = "gridtrain.core gridtrain.network.wire gridtrain.network.transport"
ANYTHING = "gridtrain gridtrain_coordinator gridtrain_worker click rich msgpack numpy zmq torch safetensors"
# the whole SDK, without simulator, command line and the two daemons
LIBRARY = f"{CORE} gridtrain.sparsify gridtrain.runtime gridtrain.training numpy torch safetensors"
LIBRARY += " gridtrain.tools.options gridtrain.tools.bundle"

# fmt: off
TABLE: dict[str, str] = {
    "gridtrain":                    "gridtrain",  # the lazy facade, which another test holds to be lazy
    "gridtrain._version":           "",
    "gridtrain.errors":             "",
    "gridtrain.config":             "",
    "gridtrain.extras":             "",
    "gridtrain.tools.options":            "",  # names, bounds and defaults of what people choose
    "gridtrain.tools.bundle":             "gridtrain.tools.options",
    "gridtrain.core":           "",
    "gridtrain.network.wire":               "gridtrain.core.messages msgpack",
    "gridtrain.network.wire.sparse_payload":        "gridtrain.core.messages numpy",
    "gridtrain.network.wire.elias_fano":     "gridtrain.core.messages numpy",
    "gridtrain.network.wire.value_encoding":        "gridtrain.core.messages numpy",
    "gridtrain.network.transport":          "gridtrain.network.wire gridtrain.core.messages zmq nacl",
    "gridtrain.sparsify":           "gridtrain.network.wire numpy",
    "gridtrain.sparsify.selection":    "gridtrain.network.wire numpy torch",
    "gridtrain.sparsify.error_feedback":  "gridtrain.network.wire numpy torch",
    "gridtrain.sparsify.cuda_selection":    "gridtrain.network.wire numpy torch",
    "gridtrain.sparsify.triton_kernels": "triton",
    "gridtrain.runtime":            f"{CORE} gridtrain.tools.options gridtrain.tools.bundle gridtrain.sparsify numpy",
    "gridtrain.training":              LIBRARY,
    "gridtrain.sdk.grid":         f"{LIBRARY} gridtrain.pipeline",  # what hands out pipelines
    "gridtrain.pipeline":           f"{LIBRARY} gridtrain.extras",
    "gridtrain.adapters":           f"{LIBRARY} gridtrain transformers lightning wandb",
    "gridtrain.sim":                "gridtrain.core gridtrain.sparsify.merge numpy",
    "gridtrain.templates":          "gridtrain torch",  # what `gridtrain new` writes: users' programs
    "gridtrain.testing":            "gridtrain gridtrain_worker.training_policy numpy torch nacl",
    "gridtrain.tools.bench":              f"{LIBRARY} gridtrain rich",
    "gridtrain.tools.doctor":             f"{CORE} gridtrain.runtime",
    "gridtrain.tools.demo":               f"{LIBRARY} gridtrain rich",
    "gridtrain.cli":                ANYTHING,     # lazily: another test holds the module level
    "gridtrain_coordinator":        f"{CORE} gridtrain.tools.options gridtrain.tools.bundle",
    "gridtrain_coordinator.dashboard": f"{CORE} gridtrain_coordinator starlette uvicorn prometheus_client",
    "gridtrain_worker":             f"{LIBRARY} gridtrain.testing.fake_sensors psutil pynvml",
}
# fmt: on

EXCEPTIONS = {
    # A whole group in one process: starts the coordinator beside the workers, and hands out `Grid`s.
    ("gridtrain.sdk.local_group", "gridtrain_coordinator"),
    ("gridtrain.sdk.local_group", "gridtrain.training"),
}

ALWAYS = ("gridtrain.errors", "gridtrain.config", "gridtrain._version")

# What a protocol core never touches: it is handed the time and never waits (DESIGN section 5).
NO_CORE_TOUCHES = {
    *("asyncio", "concurrent", "multiprocessing", "os", "queue", "select", "selectors", "signal"),
    *("socket", "subprocess", "threading", "time", "datetime", "secrets", "uuid"),
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            yield name, ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """(imported name, line).  `from a import b` counts as a.b, which is a module or a name in one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide from this test"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def row(module: str) -> str:
    return max((key for key in TABLE if under(module, key)), key=len)


def allowed(module: str, imported: str) -> bool:
    if imported.split(".")[0] in sys.stdlib_module_names:
        return True
    home = row(module)
    own_package = ".".join(module.split(".")[:2]) if home != "gridtrain" else "gridtrain"
    permitted = (*ALWAYS, own_package, home, *TABLE[home].split())
    if any(module == importer and under(imported, package) for importer, package in EXCEPTIONS):
        return True
    if under(imported, "gridtrain.cli") and not under(module, "gridtrain.cli"):
        return False  # nothing imports the command line
    return any(under(imported, package) for package in permitted)


def test_the_table_is_kept() -> None:
    wrong = [
        f"{module}:{line} imports {imported}; its row allows: {TABLE[row(module)] or 'nothing more'}"
        for module, tree in modules()
        for imported, line in imports(ast.walk(tree))
        if not allowed(module, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_has_its_own_row() -> None:
    facade = [module for module, _ in modules() if row(module) == "gridtrain"]
    assert facade == ["gridtrain"], f"these fall into the facade's row; give them one: {facade[1:]}"


def test_the_table_can_be_broken() -> None:
    assert allowed("gridtrain.network.transport.zmq.zeromq_transport", "zmq")
    assert allowed("gridtrain.sdk.local_group", "gridtrain_coordinator.daemon.Daemon")
    assert not allowed("gridtrain.runtime.io_loop", "gridtrain_coordinator.daemon.Daemon")
    assert not allowed("gridtrain.core.collectives.ring", "numpy")
    assert not allowed("gridtrain.core.collectives.ring", "gridtrain.network.wire.codec")
    assert not allowed("gridtrain.network.wire.codec", "numpy")
    assert not allowed("gridtrain.network.wire.codec", "gridtrain.core.collectives.ring.Ring")
    assert not allowed("gridtrain.sparsify.merge", "torch")
    assert not allowed("gridtrain_coordinator.daemon", "torch")
    assert not allowed("gridtrain_worker.agent", "simulation.world")
    assert not allowed("gridtrain.testing.faults", "gridtrain.cli.main")


def test_protocol_cores_have_no_clock_no_thread_and_no_socket() -> None:
    wrong = [
        f"{module}:{line} imports {imported}"
        for module, tree in modules()
        if under(module, "gridtrain.core")
        for imported, line in imports(ast.walk(tree))
        if imported.split(".")[0] in NO_CORE_TOUCHES
    ]
    assert not wrong, "\n".join(wrong)


def test_the_command_line_starts_fast() -> None:
    """`gridtrain --help` must not wait for numpy, ZeroMQ or torch: heavy imports go into commands."""
    light = (
        "click",
        "rich",
        "gridtrain.cli",
        "gridtrain.tools.demo.recipe",
        "gridtrain.tools.options",
        *ALWAYS,
    )  # recipe: constants
    wrong = [
        f"{module}:{line} imports {imported} at module level"
        for module, tree in modules()
        if under(module, "gridtrain.cli")
        for imported, line in imports(iter(tree.body))
        if imported.split(".")[0] not in sys.stdlib_module_names
        and not any(under(imported, package) for package in light)
    ]
    assert not wrong, "\n".join(wrong)


ALL_OF_THE_COORDINATOR = """
import importlib, pkgutil, gridtrain_coordinator as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
"""


@pytest.mark.parametrize(
    ("code", "unloaded"),
    [
        ("import gridtrain, gridtrain.network.wire", {"torch", "zmq"}),
        ("import gridtrain.cli", {"torch", "zmq", "numpy"}),
        (ALL_OF_THE_COORDINATOR, {"torch"}),
    ],
    ids=["facade", "cli", "coordinator"],
)
def test_importing_stays_light(code: str, unloaded: set[str]) -> None:
    code += "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not unloaded & set(done.stdout.split())


# -- nothing from the network is executed (promise 7) ----------------------------------------------

UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}


def executes(tree: ast.Module) -> Iterator[str]:
    for imported, line in imports(ast.walk(tree)):
        if imported.split(".")[0] in UNPICKLERS:
            yield f"{line} imports {imported}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("eval", "exec"):
            yield f"{node.lineno} calls {called}"
        safe = any(
            word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
            for word in node.keywords
        )
        if called == "torch.load" and not safe:
            yield f"{node.lineno} calls torch.load without weights_only=True"
        if called.endswith(("np.load", "numpy.load")) and any(
            word.arg == "allow_pickle" for word in node.keywords
        ):
            yield f"{node.lineno} calls {called} with allow_pickle"


def test_nothing_unpickles_or_evaluates() -> None:
    wrong = [f"{module}:{finding}" for module, tree in modules() for finding in executes(tree)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "eval('1')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_unpickling_would_be_seen(source: str) -> None:
    assert len(list(executes(ast.parse(source)))) == 1
