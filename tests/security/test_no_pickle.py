"""Nothing from the network or from a file is executed: only safetensors, msgpack and JSON are read.

The first part reads the sources with `ast`: no function that could execute data, and no readers but those of
the three formats.  The second part places a pickle that would create a file wherever foreign bytes are read.
"""

from __future__ import annotations

import ast
import base64
import io
import os
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gridtrain.core.collectives.collective import AddSlice, Provenance, StoreFromRank
from gridtrain.core.group.invitation import parse
from gridtrain.core.messages import StateBlock
from gridtrain.errors import GridtrainError, RemoteProtocolError
from gridtrain.network.transport.identity import Identity
from gridtrain.network.wire.codec import decode
from gridtrain.network.wire.sparse_payload import decode as decode_sparse
from gridtrain.network.wire.sparse_payload import encode
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.runtime.buffers.collective_buffers import AllGatherBuffer, DenseRingBuffer
from gridtrain.runtime.client.coordinator_client import _parse_status
from gridtrain.runtime.state_transfer.blobs import BlobReceiver, split_blocks
from gridtrain.training.checkpoint import serialization
from gridtrain_coordinator.journal.store import JournalStore

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
    "gridtrain/cli/main.py": "the command line's own table",
    "gridtrain/pipeline/__init__.py": "the package's own table",
    "tests/common/defences.py": "the table of defences",
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


# -- pickles in foreign bytes ----------------------------------------------------------------------


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


N = 64
FROM_1 = Provenance(1, 1, 2, 1)


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(2, 1)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def as_header(bomb: bytes, _: Path) -> None:
    decode([bomb])


def as_payload_of_a_sparse_exchange(bomb: bytes, _: Path) -> None:
    decode_sparse(bomb, n=N, max_entries=N, kind=ValueKind.FP16)


def as_payload_of_a_gather(bomb: bytes, _: Path) -> None:
    own = encode(*state_of_nothing(), n=N, kind=ValueKind.FP16)
    AllGatherBuffer(0, 2, own, n=N, k=N, kind=ValueKind.FP16).apply(StoreFromRank(1, bomb, FROM_1))


def as_a_dense_slice(bomb: bytes, _: Path) -> None:
    import numpy as np

    DenseRingBuffer(np.zeros(N, np.float32), 2).apply(AddSlice(0, 0, bomb, FROM_1))


def state_of_nothing() -> Any:
    import numpy as np

    return np.empty(0, np.int64), np.empty(0, np.float32)


def as_blocks_of_a_state(bomb: bytes, _: Path) -> None:
    intake = BlobReceiver()
    for index, block in enumerate(blocks := split_blocks([bomb])):
        intake.receive(StateBlock(1, 1, index, len(blocks), block))
    _, _, blobs = intake.take_blobs()
    serialization.restore_state(blobs, *model(), {})


def as_the_table_of_a_state(bomb: bytes, _: Path) -> None:
    BlobReceiver().receive(StateBlock(1, 1, 0, 2, bomb))


def as_a_states_json(bomb: bytes, _: Path) -> None:
    serialization.restore_state([struct.pack("<2Q", len(bomb), 0), bomb], *model(), {})


def as_a_states_tensors(bomb: bytes, _: Path) -> None:
    net, optimizer = model()
    own, common = serialization.capture_state(net, optimizer, {})
    text, _tensors = opened(common)
    serialization.restore_state([own, part(text, bomb)], net, optimizer, {})


def opened(a_part: bytes) -> tuple[bytes, bytes]:
    """The JSON and the tensors of a part."""
    text_bytes, tensors_bytes = struct.unpack_from("<2Q", a_part)
    return a_part[16 : 16 + text_bytes], a_part[16 + text_bytes : 16 + text_bytes + tensors_bytes]


def part(text: bytes, tensors: bytes) -> bytes:
    return struct.pack("<2Q", len(text), len(tensors)) + text + tensors


def as_a_status(bomb: bytes, _: Path) -> None:
    _parse_status("tcp://h:1", bomb)


def as_an_invitation(bomb: bytes, _: Path) -> None:
    parse("gridtrain1:" + base64.urlsafe_b64encode(bomb).decode().rstrip("="))


def as_a_key_file(bomb: bytes, folder: Path) -> None:
    path = folder / "worker.key"
    path.write_bytes(bomb)
    path.chmod(0o600)
    Identity.read(path)


def as_a_journal(bomb: bytes, folder: Path) -> None:
    path = folder / "journal.sqlite"
    path.write_bytes(bomb)
    path.chmod(0o600)
    JournalStore.open(path)


PLACES: list[Callable[[bytes, Path], None]] = [
    as_header,
    as_payload_of_a_sparse_exchange,
    as_payload_of_a_gather,
    as_a_dense_slice,
    as_blocks_of_a_state,
    as_the_table_of_a_state,
    as_a_states_json,
    as_a_states_tensors,
    as_a_status,
    as_an_invitation,
    as_a_key_file,
    as_a_journal,
]


def by_pickle(bomb: Bomb) -> bytes:
    return pickle.dumps(bomb)


def by_torch(bomb: Bomb) -> bytes:
    buffer = io.BytesIO()
    torch.save({"state": bomb}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("made", [by_pickle, by_torch])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_pickle_is_executed_nowhere(
    place: Callable[[bytes, Path], None], made: Callable[[Bomb], bytes], tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    with pytest.raises(GridtrainError):
        place(made(Bomb(mark)), tmp_path)
    assert not mark.exists()


def test_the_pickle_works(tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    mark = tmp_path / "executed"
    pickle.loads(by_pickle(Bomb(mark)))
    assert mark.exists()
    other = tmp_path / "executed by torch"
    torch.load(io.BytesIO(by_torch(Bomb(other))), weights_only=False)
    assert other.exists()


# -- JSON that is no state -------------------------------------------------------------------------

JUNK: list[Any] = [None, 5, 1e308, "x", [], {}, {"list": []}, {"dict": []}, {"tensor": "99"}, {"tensor": []}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize("key", ["parameters", "buffers", "optimizer", "trackers"])
def test_a_part_of_a_state_of_another_type_is_refused(key: str, junk: Any) -> None:
    import json

    net, optimizer = model()
    before = serialization.replica_digest(net, optimizer)
    if (key, junk) in [("buffers", {"dict": []}), ("trackers", {})]:
        return  # the valid type of this field
    state = serialization.capture_state(net, optimizer, {})
    which = 0 if key in ("buffers", "trackers") else 1
    text, tensors = opened(state[which])
    document = json.loads(bytes(text))
    document[key] = junk
    state[which] = part(json.dumps(document).encode(), tensors)
    with pytest.raises(RemoteProtocolError):
        serialization.restore_state(state, net, optimizer, {})
    assert serialization.replica_digest(net, optimizer) == before


@pytest.mark.parametrize("junk", [*JUNK, {"dict": [[True, 1], ["a", 1]]}], ids=repr)
@pytest.mark.parametrize("at", ["state", "param_groups"])
def test_a_part_of_an_optimizers_state_of_another_type_is_refused(at: str, junk: Any) -> None:
    import json

    net, optimizer = model()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    own, common = serialization.capture_state(net, optimizer, {})
    text, tensors = opened(common)
    document = json.loads(bytes(text))
    for entry in document["optimizer"]["dict"]:
        if entry[0] == at:
            entry[1] = junk
    changed = json.dumps(document).encode()
    if (at, junk) == ("state", {"dict": []}):
        return  # an optimizer without a step
    with pytest.raises(RemoteProtocolError):
        serialization.restore_state([own, part(changed, tensors)], net, optimizer, {})


@pytest.mark.parametrize("junk", [*JUNK, [{"lr": 1.0}], {"list": [{"dict": [["params", 5]]}]}], ids=repr)
def test_settings_of_another_type_are_refused(junk: Any) -> None:
    import json

    net, optimizer = model()
    (own,) = serialization.capture_state(net, optimizer, {}, whole=False)
    text, tensors = opened(own)
    document = json.loads(bytes(text)) | {"settings": junk}
    with pytest.raises(RemoteProtocolError):
        serialization.restore_state([part(json.dumps(document).encode(), tensors)], net, optimizer, {})
    assert isinstance(optimizer.param_groups[0]["lr"], float)
