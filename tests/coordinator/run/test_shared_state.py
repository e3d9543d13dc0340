"""The parts of the coordinator's core share objects, but each attribute is assigned by one class only."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import gridtrain_coordinator

ROOT = Path(gridtrain_coordinator.__file__).parent
PURE = [file for part in ("run", "stages", "membership") for file in sorted((ROOT / part).glob("*.py"))]


def targets(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign(targets=found):
            return [each for one in found for each in (one.elts if isinstance(one, ast.Tuple) else [one])]
        case ast.AugAssign(target=one) | ast.AnnAssign(target=one):
            return [one]
    return []


def test_no_attribute_of_a_shared_object_is_assigned_by_two_classes() -> None:
    assigned_by: dict[str, set[str]] = defaultdict(set)
    for file in PURE:
        for cls in [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]:
            for target in [each for node in ast.walk(cls) for each in targets(node)]:
                if not isinstance(target, ast.Attribute):
                    continue
                owner = ast.unparse(target.value)
                if owner != "self":  # of another object: worker.standby_reason, run.phase
                    kind = "worker" if "worker" in owner else owner.removeprefix("self.").lstrip("_")
                    assigned_by[f"{kind}.{target.attr}"].add(f"{file.stem}.{cls.name}")
    shared = {name: sorted(classes) for name, classes in assigned_by.items() if len(classes) > 1}
    assert not shared, shared
    own = [name for name in assigned_by if name.startswith(("run.", "view_change.", "run.view_change."))]
    assert not own, "RunState and ViewChange change only through their methods"
