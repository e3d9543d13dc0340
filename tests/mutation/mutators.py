"""Small changes to a module's syntax tree, each of which the tests should notice.

Compared, arithmetic and boolean operators, numbers, conditions, return values and single statements are
changed. Annotations, decorators, docstrings, texts, arguments of raised errors, log calls and strict=True of
zip, an assertion that no correct program violates, are not.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SWAPPED: list[tuple[type[ast.AST], type[ast.AST]]] = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.LShift, ast.RShift),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
]
OPERATORS = {
    **dict(SWAPPED),
    **{new: old for old, new in SWAPPED},
    **dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult),
    ast.BitXor: ast.BitAnd,
}
UNTOUCHED_FIELDS = {"annotation", "returns", "decorator_list", "msg", "bases", "type_params"}
SEQUENCES = (ast.Tuple, ast.List, ast.ListComp, ast.JoinedStr)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the `number`-th that is possible in the file. `before` and `after`: its statement."""

    file: str
    number: int
    function: str
    line: int
    end_line: int
    operator: str
    before: str
    after: str

    def key(self) -> tuple[str, str, str, str]:
        """Names it, also after lines moved."""
        return (self.file, self.function, self.before, self.after)

    def diff(self) -> str:
        return f"{self.file}:{self.line} ({self.function or 'module'})\n  - {self.before}\n  + {self.after}"


@dataclass(frozen=True, slots=True)
class _Site:
    function: str
    statement: ast.stmt
    line: int
    end_line: int
    operator: str
    old: ast.AST
    new: ast.AST
    put: Callable[[ast.AST], None]
    """Puts a node where `old` is."""


def mutants(root: Path, file: str) -> list[Mutant]:
    """All that are possible in the file."""
    found = []
    for number, site in enumerate(_sites(ast.parse((root / file).read_text(encoding="utf-8")))):
        before = _text(site.statement)
        site.put(site.new)
        after = _text(site.new if isinstance(site.new, ast.stmt) else site.statement)
        site.put(site.old)
        found.append(
            Mutant(file, number, site.function, site.line, site.end_line, site.operator, before, after)
        )
    return found


def sample(root: Path, files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` of them, chosen by a hash of each, so that other files' changes rarely matter."""
    by_hash: dict[bytes, Mutant] = {}
    for file in files:
        seen: dict[tuple[str, ...], int] = {}
        for mutant in mutants(root, file):
            key = (*mutant.key(), mutant.operator)
            seen[key] = seen.get(key, 0) + 1
            text = repr((seed, *key, seen[key]))
            by_hash[hashlib.blake2b(text.encode()).digest()] = mutant
    chosen = [by_hash[digest] for digest in sorted(by_hash)[:count]]
    return sorted(chosen, key=lambda mutant: (mutant.file, mutant.line, mutant.number))


def mutated_tree(root: Path, mutant: Mutant) -> ast.Module:
    """The file's tree with the change; line numbers are those of the file."""
    tree = ast.parse((root / mutant.file).read_text(encoding="utf-8"))
    site = _sites(tree)[mutant.number]
    site.put(site.new)
    return ast.fix_missing_locations(tree)


# -- where a change is possible --------------------------------------------------------------------


def _sites(tree: ast.Module) -> list[_Site]:
    return list(_within(tree, "", None))


def _within(node: ast.AST, function: str, statement: ast.stmt | None) -> Iterator[_Site]:
    for field, value in ast.iter_fields(node):
        if field in UNTOUCHED_FIELDS or (isinstance(node, ast.ClassDef) and field == "keywords"):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_untouched(child):
                continue

            def put(new: ast.AST, field: str = field, value: object = value, index: int = index) -> None:
                if isinstance(value, list):
                    value[index] = new
                else:
                    setattr(node, field, new)

            inside = child if isinstance(child, ast.stmt) else statement
            if inside is not None:
                place = child if hasattr(child, "lineno") else node
                lines = place.lineno, place.end_lineno
                for operator, new in _changes(node, field, child):
                    yield _Site(function, inside, *lines, operator, child, ast.copy_location(new, place), put)
            if not isinstance(child, ast.Raise):  # its arguments are a message
                name = function
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    name = f"{function}.{child.name}" if function else child.name
                yield from _within(child, name, inside)


def _is_untouched(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
        case ast.FunctionDef(name="__repr__" | "__str__") | ast.keyword(arg="repr"):
            return True
        case ast.keyword(arg="strict", value=ast.Constant(value=True)):
            return True
        case ast.Call(func=ast.Name(id="LogEvent")):
            return True
        case ast.Expr(value=ast.Call(args=[ast.Call() as argument])):
            return _is_untouched(argument)
    return False


def _changes(node: ast.AST, field: str, child: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What takes the place of `child`, which is in `field` of `node`."""
    if type(child) in OPERATORS and not _is_of_types_or_texts(node):
        yield "operator", OPERATORS[type(child)]()
    match child:
        case ast.Constant(value=bool() as flag):
            yield "constant", ast.Constant(not flag)
        case ast.Constant(value=int() | float() as number) if number + 1 != number:
            yield "constant", ast.Constant(number + 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negate", operand
        case ast.Return(value=ast.expr() as result) if not _is_none_or_false(result):
            yield "return", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() as call) if not _is_untouched(call):
            yield "delete", ast.Pass()
        case (
            ast.Return(value=None)
            | ast.AugAssign()
            | ast.Raise()
            | ast.Continue()
            | ast.Break()
            | ast.Delete()
        ):
            yield "delete", ast.Pass()
        case ast.Assign(targets=targets):
            if all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
                yield "delete", ast.Pass()
    is_condition = field == "test" or (field == "ifs" and isinstance(node, ast.comprehension))
    if is_condition and isinstance(child, ast.expr) and not _is_changed_anyway(child):
        yield "negate", ast.UnaryOp(ast.Not(), child)


def _is_of_types_or_texts(node: ast.AST) -> bool:
    """`A | None`, "a" + b, [a] + b, effects += f(): another operator there is an error at once."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.value, (*SEQUENCES, ast.Call))
    if not isinstance(node, ast.BinOp):
        return False
    operands = (node.left, node.right)
    if isinstance(node.op, ast.BitOr):
        return any(
            (isinstance(each, ast.Name) and each.id[:1].isupper())
            or (isinstance(each, ast.Constant) and each.value is None)
            or (isinstance(each, ast.BinOp) and _is_of_types_or_texts(each))
            for each in operands
        )
    return any(
        isinstance(each, SEQUENCES)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in operands
    )


def _is_changed_anyway(condition: ast.expr) -> bool:
    """Its negation is one of the other changes."""
    match condition:
        case ast.UnaryOp(op=ast.Not()) | ast.Constant():
            return True
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            return True
    return False


def _is_none_or_false(result: ast.expr) -> bool:
    return isinstance(result, ast.Constant) and (result.value is None or result.value is False)


def _text(statement: ast.stmt) -> str:
    """A simple statement; the first line of a compound one."""
    header = copy.copy(statement)
    for field in ("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"):
        if hasattr(header, field):
            setattr(header, field, [])
    return ast.unparse(header)
