"""All targets by name.  A target's module, and the product with it, is imported when it is requested."""

from __future__ import annotations

import importlib
import importlib.util

from gridfuzz.targets.base import Target

_MODULES = {
    "codec": "frames",
    "sparse": "payloads",
    "merge": "payloads",
    "slices": "slices",
    "status": "texts",
    "addresses": "texts",
    "invitation": "texts",
    "journal": "stores",
    "stateblocks": "stores",
    "state": "stores",
    "sealed": "secure_channels",
    "collectives": "exchanges",
    "attempts": "rounds",
    "member": "members",
    "membership": "coordinators",
    "door": "access",
}
_NEEDS = {
    "invitation": "gridtrain.core.group.invitation",
    "sealed": "gridtrain.network.transport.secure_channel",
    "door": "gridtrain_coordinator.access.authorization",
    "state": "torch",
}
NAMES = tuple(_MODULES)


def missing(name: str) -> str:
    """Requirement of the target that is not installed; empty: it can run."""
    need = _NEEDS.get(name, "gridtrain")
    return "" if importlib.util.find_spec(need) is not None else need


def find(name: str) -> Target:
    module = importlib.import_module(f"gridfuzz.targets.{_MODULES[name]}")
    (target,) = [target for target in module.TARGETS if target.name == name]
    return target
