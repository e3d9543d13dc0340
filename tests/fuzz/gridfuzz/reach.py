"""Which lines of the product an input reaches, and in which order, by Python's own tracing.

Reach(modules).trace(action) -> steps from line to line that were not reached before
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

Step = tuple[str, int, int]  # file, from line, to line


class Reach:
    """Lines reached in the named modules; `steps` and `lines` grow with each `trace`."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._lines_of = {_file_of(name): _lines(name) for name in modules}
        self.steps: set[Step] = set()
        self._fresh: set[Step] = set()

    def trace(self, action: Callable[[], Any]) -> set[Step]:
        """All steps of this action."""
        self._fresh = set()
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            action()
        finally:
            sys.settrace(before)
        return self._fresh

    def add(self, steps: set[Step]) -> bool:
        """Add steps; returns whether any of them is new."""
        known = len(self.steps)
        self.steps |= steps
        return len(self.steps) > known

    @property
    def lines(self) -> int:
        return len({(file, line) for file, _, line in self.steps if line in self._lines_of[file]})

    @property
    def lines_in_all(self) -> int:
        return sum(len(lines) for lines in self._lines_of.values())

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in self._lines_of:
            return None
        last = 0
        fresh = self._fresh

        def on_line(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "line":
                line = frame.f_lineno
                fresh.add((file, last, line))
                last = line
            return on_line

        return on_line


def _file_of(module: str) -> str:
    return str(importlib.import_module(module).__file__)


def _lines(module: str) -> set[int]:
    """Lines of functions' bodies, without those that run at import."""
    file = _file_of(module)
    with open(file, encoding="utf-8") as source:
        whole = compile(source.read(), file, "exec")
    lines: set[int] = set()
    todo = [(whole, False)]
    while todo:
        code, is_body = todo.pop()
        inner = [const for const in code.co_consts if isinstance(const, CodeType)]
        todo += [(const, bool(const.co_flags & 0x1)) for const in inner]  # CO_OPTIMIZED: a function's
        if is_body:
            lines |= {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
    return lines
