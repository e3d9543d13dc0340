"""Nothing from the network or from a file is executed: only safetensors, msgpack and JSON are read.

The first part reads the sources with `ast`: no function that could execute data, and no readers but those of
the three formats.  The second part has states whose JSON has other types than a state.
"""

from __future__ import annotations

import ast
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gridtrain.errors import RemoteProtocolError
from gridtrain.training.checkpoint import serialization

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("gridtrain", "coordinator", "worker", "examples")
HERE = Path(__file__).resolve()

# -- the sources ---------------------------------------------------------------------------------

EXECUTORS = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "code"),
    *("multiprocessing", "torch.package", "torch.hub", "torch.jit", "runpy", "imp"),
}
"""Modules that execute what they read, or send objects by pickling them."""

BUILTINS = {"eval", "exec", "compile", "__import__"}
READERS = {"load", "loads", "load_file", "unpackb", "unpack", "Unpacker", "safe_load", "fromfile"}
ALLOWED_READERS = {"triton.language", "json", "msgpack", "safetensors.torch", "struct", "tomllib"}
OURS = {"gridtrain", "gridtrain_coordinator", "gridtrain_worker", "gridfuzz"}  # read by this test, too

BY_NAME = {
    "gridtrain/__init__.py": "the facade's own table",
    "gridtrain/__main__.py": "the command line, a constant",
    "gridtrain/cli/main.py": "the command line's own table",
    "gridtrain/pipeline/__init__.py": "the package's own table",
}
"""Files that may call `importlib.import_module`, and the origin of the name, which is never data."""

RUN_OUR_OWN = {
    "tests/adapters/scripts/recorded.py": "runs the templates of this repository",
    "tests/adapters/scripts/run_example.py": "runs the examples of this repository",
    "tests/common/declared_defaults.py": "imports the modules of this repository whose defaults it lists",
    "tests/common/forkserver.py": "runs the programs that tests start, in the place of an interpreter",
    "tests/pipeline/oracle.py": "torch's own pipelines, which read what their processes have written",
}
"""Programs of the tests that may execute files, because these are parts of this repository."""

COMPILES_OUR_SOURCE = re.compile(
    r"tests/(fuzz/gridfuzz|mutation)/\w+\.py:\d+: (calls compile|calls exec|imports by name)$"
)


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in (ROOT / folder).rglob("*.py") if path != HERE)


def dangers(tree: ast.Module, where: str) -> Iterator[str]:
    """ "line: what" for each call or import that could execute data."""
    modules = imported_modules(tree)
    for name, line in modules.values():
        if any(name == banned or name.startswith(banned + ".") for banned in EXECUTORS):
            yield f"{line}: imports {name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in BUILTINS or called.removeprefix("builtins.") in BUILTINS:
            yield f"{node.lineno}: calls {called}"
        elif called.endswith("import_module") and where not in BY_NAME:
            yield f"{node.lineno}: imports by name"
        elif isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
            holder = ast.unparse(node.func.value)
            first = holder.split(".")[0]
            reader = modules.get(holder, modules.get(first, ("", 0)))[0]
            harmless = {holder, reader} & ALLOWED_READERS or reader.split(".")[0] in OURS
            if first in modules and not harmless:
                yield f"{node.lineno}: reads with {called}"
        if any(word.arg == "allow_pickle" and not is_false(word.value) for word in node.keywords):
            yield f"{node.lineno}: {called} with allow_pickle"


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def imported_modules(tree: ast.Module) -> dict[str, tuple[str, int]]:
    """By local name: (imported name, line)."""
    found: dict[str, tuple[str, int]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = (f"{node.module}.{alias.name}", node.lineno)
    return found


def found_in(paths: Iterator[Path]) -> list[str]:
    wrong = []
    for path in paths:
        where = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        wrong += [f"{where}:{danger}" for danger in dangers(tree, where)]
    return wrong


def test_nothing_in_the_product_executes_data() -> None:
    assert found_in(sources(*PRODUCT)) == []


def test_no_helper_of_the_tests_executes_data() -> None:
    """Except for `RUN_OUR_OWN`, and the fuzzer and mutants, which compile this repository's sources."""
    helpers = (
        path
        for path in sources("tests")
        if not path.name.startswith("test_") and path.relative_to(ROOT).as_posix() not in RUN_OUR_OWN
    )
    found = [danger for danger in found_in(helpers) if not COMPILES_OUR_SOURCE.match(danger)]
    assert found == []


def test_all_exceptions_are_needed() -> None:
    for where in BY_NAME:
        assert "import_module" in (ROOT / where).read_text(encoding="utf-8"), where
    for where in RUN_OUR_OWN:
        assert found_in(iter([ROOT / where])), where


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import package",
        "from multiprocessing import Process",
        "def f():\n    from marshal import loads",
        "import yaml",
        "eval('1')",
        "exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "import builtins\nbuiltins.eval(text)",
        "import importlib\nimportlib.import_module(name)",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.fromfile(path)",
        "read(path, allow_pickle=True)",
    ],
)
def test_dangerous_source_is_found(source: str) -> None:
    assert len(list(dangers(ast.parse(source), "x.py"))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads(text)",
        "import tomllib\ntomllib.loads(text)",
        "import safetensors.torch\nsafetensors.torch.load(data)",
        "import re\nre.compile('a')",
        "self.averages.load(workspace)",
        "feedback.load(state)",
    ],
)
def test_harmless_source_is_accepted(source: str) -> None:
    assert list(dangers(ast.parse(source), "x.py")) == []


# -- JSON that is no state -------------------------------------------------------------------------

JUNK: list[Any] = [None, 5, 1e308, "x", [], {}, {"list": []}, {"dict": []}, {"tensor": "99"}, {"tensor": []}]
PARTS = {
    **dict.fromkeys(["parameters", "buffers", "optimizer", "trackers"], JUNK),
    "optimizer's state": [*JUNK, {"dict": [[True, 1], ["a", 1]]}],
    "optimizer's param_groups": [*JUNK, {"dict": [[True, 1], ["a", 1]]}],
    "settings": [*JUNK, [{"lr": 1.0}], {"list": [{"dict": [["params", 5]]}]}],
}
VALID = [("buffers", {"dict": []}), ("trackers", {}), ("optimizer's state", {"dict": []})]


@pytest.mark.parametrize(
    ("part", "junk"),
    [(part, junk) for part, values in PARTS.items() for junk in values if (part, junk) not in VALID],
    ids=repr,
)
def test_a_part_of_a_state_of_another_type_is_refused(part: str, junk: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = serialization.replica_digest(model, optimizer)
    state = serialization.capture_state(model, optimizer, {}, whole=part != "settings")
    which = 0 if part in ("buffers", "trackers", "settings") else 1
    text_bytes, tensors_bytes = struct.unpack_from("<2Q", state[which])
    document = json.loads(bytes(state[which][16 : 16 + text_bytes]))
    if part.startswith("optimizer's"):
        entries = document["optimizer"]["dict"]
        next(entry for entry in entries if entry[0] == part.split()[1])[1] = junk
    else:
        document[part] = junk
    text = json.dumps(document).encode()
    tensors = state[which][16 + text_bytes :][:tensors_bytes]
    state[which] = struct.pack("<2Q", len(text), tensors_bytes) + text + tensors
    with pytest.raises(RemoteProtocolError):
        serialization.restore_state(state, model, optimizer, {})
    assert part.startswith("optimizer's") or serialization.replica_digest(model, optimizer) == before
    assert isinstance(optimizer.param_groups[0]["lr"], float)
