"""Allowed imports (docs/architecture.md), read from the source with `ast`, function-level imports too.

Every file of the three packages is checked against the longest row of `TABLE` that fits its name.  A row
always allows the standard library, `gridtrain.{errors,config,extras,quantities,_version}` and the modules
below the row's own name.
"""

from __future__ import annotations

import ast
import functools
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

NETWORK = "gridtrain.core gridtrain.network"
RUNTIME = f"{NETWORK} gridtrain.sparsify gridtrain.runtime numpy"
TRAINING = f"{RUNTIME} gridtrain.training torch safetensors"
CHILDREN = "gridtrain.tools.child_processes"
OPTIONS = "gridtrain.tools.options gridtrain.tools.bundle"
LIBRARY = f"{TRAINING} gridtrain.pipeline {OPTIONS}"
ANYTHING = "gridtrain gridtrain_coordinator gridtrain_worker click rich msgpack numpy zmq torch safetensors"

# fmt: off
TABLE: dict[str, str] = {
    "gridtrain":                     "gridtrain",  # the lazy facade, which another test holds to be lazy
    "gridtrain.__main__":            "",
    "gridtrain._version":            "",
    "gridtrain.errors":              "",
    "gridtrain.config":              "",
    "gridtrain.extras":              "",
    "gridtrain.quantities":          "",
    "gridtrain.event_text":          "",
    "gridtrain.status_fields":       "",
    "gridtrain.device_speed":        "torch",
    "gridtrain.core":                "",
    "gridtrain.network":             "gridtrain.core",
    "gridtrain.network.wire":        "gridtrain.core.messages msgpack",
    "gridtrain.network.wire.dense_payload":  "gridtrain.core.messages gridtrain.network.wire numpy",
    "gridtrain.network.wire.sparse_payload": "gridtrain.core.messages gridtrain.network.wire numpy",
    "gridtrain.network.wire.elias_fano":     "gridtrain.core.messages gridtrain.network.wire numpy",
    "gridtrain.network.wire.value_encoding": "gridtrain.core.messages gridtrain.network.wire numpy",
    "gridtrain.network.wire.level_encoding": "gridtrain.core.messages gridtrain.network.wire numpy",
    "gridtrain.network.transport":   "gridtrain.network.wire gridtrain.core.messages zmq nacl",
    "gridtrain.sparsify":            "gridtrain.network.wire numpy",
    "gridtrain.sparsify.selection":  "gridtrain.network.wire gridtrain.sparsify numpy torch",
    "gridtrain.sparsify.error_feedback": "gridtrain.network.wire gridtrain.sparsify numpy torch",
    "gridtrain.sparsify.cuda_selection": "gridtrain.network.wire gridtrain.sparsify numpy torch",
    "gridtrain.sparsify.tensor_selection": "gridtrain.network.wire gridtrain.sparsify numpy torch",
    "gridtrain.sparsify.triton_kernels": "triton",
    "gridtrain.runtime":             f"{NETWORK} gridtrain.sparsify numpy",
    "gridtrain.training":            TRAINING,
    "gridtrain.training.checkpoint": f"{TRAINING} fsspec",
    "gridtrain.training.data":       f"{TRAINING} fsspec transformers msgpack pyarrow",
    "gridtrain.pipeline":            f"{TRAINING} gridtrain.extras",
    "gridtrain.sdk":                 f"{LIBRARY} gridtrain.device_speed",  # what users hold
    "gridtrain.adapters":            f"{LIBRARY} gridtrain transformers peft trl datasets lightning "
                                     "mlflow wandb",
    "gridtrain.testing":             "gridtrain numpy torch nacl",
    "gridtrain.tools.options":       "",  # names, bounds, defaults of what people choose
    "gridtrain.tools.bundle":        "gridtrain.tools.options gridtrain.core.messages",
    "gridtrain.tools.templates":     "gridtrain torch transformers peft",  # users' programs
    "gridtrain.tools.bench":         f"{LIBRARY} {CHILDREN} gridtrain rich",
    "gridtrain.tools.doctor":        f"{RUNTIME} gridtrain.tools.options gridtrain.status_fields",
    "gridtrain.tools.demo":          f"{LIBRARY} {CHILDREN} gridtrain rich",
    "gridtrain.tools.demo.small_llama": "torch tokenizers transformers",
    "gridtrain.tools":               "",
    "gridtrain.cli":                 ANYTHING,     # lazily: another test holds the module level
    "gridtrain_coordinator":         f"{NETWORK} {OPTIONS} gridtrain.tools.log_output "
                                     "gridtrain.runtime.client.endpoint_file "
                                     "gridtrain.runtime.client.private_file "
                                     "gridtrain.runtime.client.worker_defaults",
    "gridtrain_coordinator.run":     "gridtrain.core gridtrain_coordinator.run",
    "gridtrain_coordinator.stages":  "gridtrain.core gridtrain_coordinator.run gridtrain_coordinator.stages",
    "gridtrain_coordinator.membership": "gridtrain.core gridtrain_coordinator",
    "gridtrain_coordinator.access":  "gridtrain.core gridtrain_coordinator.run gridtrain_coordinator.access",
    "gridtrain_coordinator.dashboard": f"{NETWORK} gridtrain.event_text gridtrain_coordinator starlette "
                                     "uvicorn prometheus_client gridtrain.runtime.client.private_file",
    "gridtrain_worker":              f"{LIBRARY} gridtrain.tools.log_output "
                                     "gridtrain.testing.fake_sensors psutil pynvml",
}
# fmt: on

EXCEPTIONS = {
    # A whole group in one process: starts the coordinator beside the workers.
    ("gridtrain.sdk.local_group", "gridtrain_coordinator"),
}

ALWAYS = (
    "gridtrain.errors",
    "gridtrain.config",
    "gridtrain.extras",
    "gridtrain.quantities",
    "gridtrain._version",
)

PURE = (
    "gridtrain.core",
    *(f"gridtrain_coordinator.{part}" for part in ("run", "stages", "membership", "access")),
)

# Modules that pure code never imports: time is passed in, and it never waits (docs/architecture.md).
NO_CORE_TOUCHES = {
    *("asyncio", "concurrent", "multiprocessing", "os", "queue", "select", "selectors", "signal"),
    *("socket", "subprocess", "threading", "time", "datetime", "secrets", "uuid"),
}


@functools.cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    return tuple(_parsed())


def _parsed() -> Iterator[tuple[str, ast.Module]]:
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
    permitted = (*ALWAYS, home, *TABLE[home].split())
    if any(module == importer and under(imported, package) for importer, package in EXCEPTIONS):
        return True
    if under(imported, "gridtrain.cli") and not under(module, "gridtrain.cli"):
        return False  # nothing imports the command line
    return any(under(imported, package) for package in permitted)


def test_imports_are_those_of_the_table() -> None:
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


def test_a_forbidden_import_is_found() -> None:
    assert allowed("gridtrain.network.transport.zmq.zeromq_transport", "zmq")
    assert allowed("gridtrain.sdk.local_group", "gridtrain_coordinator.daemon.Coordinator")
    assert not allowed("gridtrain.runtime.io_loop", "gridtrain_coordinator.daemon.Coordinator")
    assert not allowed("gridtrain.core.collectives.ring", "numpy")
    assert not allowed("gridtrain.core.collectives.ring", "gridtrain.network.wire.codec")
    assert not allowed("gridtrain.network.wire.codec", "numpy")
    assert not allowed("gridtrain.network.wire.codec", "gridtrain.core.collectives.ring.RingAllReduce")
    assert not allowed("gridtrain.sparsify.merge", "torch")
    assert not allowed("gridtrain_coordinator.daemon", "torch")
    assert not allowed("gridtrain_worker.agent", "simulation.world")
    assert not allowed("gridtrain.testing.faults", "gridtrain.cli.main")


def test_protocol_cores_have_no_clock_no_thread_and_no_socket() -> None:
    wrong = [
        f"{module}:{line} imports {imported}"
        for module, tree in modules()
        if any(under(module, package) for package in PURE)
        for imported, line in imports(ast.walk(tree))
        if imported.split(".")[0] in NO_CORE_TOUCHES
    ]
    assert not wrong, "\n".join(wrong)


def _modules_imported() -> dict[str, set[str]]:
    """Each module with the modules of this project that it imports, except for type checkers."""
    trees = dict(modules())
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        names = {name for name, _ in imports(ast.walk(tree))}
        known = {name if name in trees else name.rpartition(".")[0] for name in names}
        found[module] = {name for name in known if name in trees and name != module}
    return found


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of a directed graph; empty: there is none."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        stack = [(start, iter(sorted(graph[start])))] if start not in done else []
        path += [start] if stack else []
        while stack:
            node, following = stack[-1]
            for successor in following:
                if successor in path:
                    return [*path[path.index(successor) :], successor]
                if successor not in done and successor in graph:
                    path.append(successor)
                    stack.append((successor, iter(sorted(graph[successor]))))
                    break
            else:
                done.add(node)
                stack.pop()
                path.pop()
    return []


def test_no_modules_and_no_folders_import_each_other() -> None:
    """Except for facades (`__init__`), which import what they export."""
    packages = {
        ".".join((name, *folder.relative_to(source).parts[:-1]))
        for name, source in SOURCES.items()
        for folder in source.rglob("__init__.py")
    }
    graph = {
        m: {n for n in ns if n not in packages} for m, ns in _modules_imported().items() if m not in packages
    }
    assert not _cycle(graph)
    folders: dict[str, set[str]] = {}
    for module, targets in graph.items():
        folder = module.rpartition(".")[0]
        others = {target.rpartition(".")[0] for target in targets}
        folders.setdefault(folder, set()).update(others - {folder})
    assert not _cycle(folders)
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) and not _cycle(
        {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    )


def test_the_command_line_starts_fast() -> None:
    """`gridtrain --help` must not wait for numpy, ZeroMQ or torch: heavy imports go into commands."""
    light = (
        "click",
        "rich",
        "gridtrain.cli",
        "gridtrain.event_text",
        "gridtrain.status_fields",
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

AN_AGENT_THAT_FETCHES = """
import gridtrain.cli.worker
from types import SimpleNamespace
from gridtrain_worker import agent
job = SimpleNamespace(cache_limit_bytes=lambda: 1 << 30)
assert agent._fetch_data(job, None, SimpleNamespace(is_stopping=True), None, None, None) == (0, None)
"""


@pytest.mark.parametrize(
    ("code", "unloaded"),
    [
        ("import gridtrain, gridtrain.network.wire", {"torch", "zmq"}),
        ("import gridtrain; gridtrain.pipeline, gridtrain.testing.Faults", {"torch"}),
        ("import gridtrain.cli", {"torch", "zmq", "numpy"}),
        (ALL_OF_THE_COORDINATOR, {"torch"}),
        (AN_AGENT_THAT_FETCHES, {"torch"}),
    ],
    ids=["facade", "subpackages", "cli", "coordinator", "agent"],
)
def test_importing_stays_light(code: str, unloaded: set[str]) -> None:
    code += "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not unloaded & set(done.stdout.split())
