"""Defaults of fields and arguments, and constants, as a package declares them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

NUMBERS = (bool, int, float)
ASSIGNED = re.compile(r"^(_?[A-Z]\w+(?:, _?[A-Z]\w+)*) = ", re.MULTILINE)


def unusual_defaults(package: str) -> Mapping[str, bool | int | float]:
    """Default numbers and flags other than 0 and False, by module without the package, function and name."""
    return {
        f"{module.__name__.removeprefix(package + '.')}.{name}": default
        for module in _modules(package)
        for name, default in _defaults(module)
        if type(default) in NUMBERS and default != 0
    }


def constants(package: str) -> list[tuple[str, object]]:
    """Numbers, and tuples and mappings of numbers, with names in capitals, where they are assigned."""
    found = []
    for module in _modules(package):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        assigned = {name for names in ASSIGNED.findall(source) for name in names.split(", ")}
        for name in sorted(assigned):
            value = getattr(module, name)
            parts = [*value.values()] if isinstance(value, dict) else value
            numbers = parts if isinstance(parts, tuple | list) else [parts]
            if numbers and all(type(each) in NUMBERS for each in numbers):
                found.append((f"{module.__name__.removeprefix(package + '.')}.{name}", value))
    return found


def _modules(package: str) -> Iterator[ModuleType]:
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        try:
            yield importlib.import_module(info.name)
        except ModuleNotFoundError as missing:
            if missing.name != "triton":
                raise


def _defaults(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if getattr(value, "__module__", "") != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield from _of_function(name, value)
        elif inspect.isclass(value):
            if dataclasses.is_dataclass(value):
                for field in dataclasses.fields(value):
                    yield f"{name}.{field.name}", field.default
            for member in vars(value).values():
                function = getattr(member, "__func__", member)
                is_generated = dataclasses.is_dataclass(value) and function is value.__init__
                if isinstance(function, FunctionType) and not is_generated:
                    yield from _of_function(f"{name}.{function.__name__}", function)


def _of_function(name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    for parameter in inspect.signature(function).parameters.values():
        yield f"{name}({parameter.name})", parameter.default
