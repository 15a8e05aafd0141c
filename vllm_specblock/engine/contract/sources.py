"""vLLM's sources, parsed and not imported: installed ones, or those of a wheel."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = "vllm"


class NotThere(Exception):
    """One clause: what is not there."""


@dataclass(frozen=True)
class Part:
    """A class, a function, a value or a whole module.

    Attributes:
        file: below the package's folder.
        node: in the module's tree.
        lines: of the module.
    """

    file: str
    node: ast.AST
    lines: list[str] = field(repr=False)

    @cached_property
    def text(self) -> str:
        """Its source without white space, however it is broken into lines."""
        if isinstance(self.node, ast.Module):
            lines = self.lines
        else:
            first, last = getattr(self.node, "lineno", 1), getattr(self.node, "end_lineno", 0)
            lines = self.lines[first - 1 : last]
        return squeezed("".join(lines))

    @property
    def arguments(self) -> list[str]:
        """Names of a function's parameters, in the order of its signature.

        Raises:
            NotThere: it is no function.
        """
        if not isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            raise NotThere(f"it is no function in {self.file}")
        given = self.node.args
        found = [*given.posonlyargs, *given.args, *filter(None, [given.vararg])]
        found += [*given.kwonlyargs, *filter(None, [given.kwarg])]
        return [argument.arg for argument in found]


def squeezed(text: str) -> str:
    return "".join(text.split())


def installed() -> Path | None:
    """The folder of the vLLM that Python would import, and does not here; None: there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) if folders else None


class Sources:
    """A folder `vllm`, whose names are found as Python would find them.

    Follows imports and base classes inside the package. Of what is defined twice, as overloads are,
    the last counts.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Part] = {}

    def module(self, file: str) -> Part:
        """A whole module.

        Raises:
            NotThere: there is no such file.
        """
        if file not in self._modules:
            path = self.root / file
            if not path.is_file():
                raise NotThere(f"there is no {PACKAGE}/{file}")
            text = path.read_text(encoding="utf-8")
            self._modules[file] = Part(file, ast.parse(text), text.splitlines(keepends=True))
        return self._modules[file]

    def find(self, file: str, name: str) -> Part:
        """What a module calls `name`, e.g. "Class.method"; "": the module.

        Raises:
            NotThere: it is not there.
        """
        part = self.module(file)
        for each in filter(None, name.split(".")):
            found = self._member(part, each)
            if found is None:
                raise NotThere(f"{part.file} has no {name!r}")
            part = found
        return part

    def file_of(self, module: str) -> str | None:
        """The file of a module of the package, by its dotted name; None: there is none."""
        where = Path(*module.split(".")[1:])
        for file in (where.with_suffix(".py") if where.name else where, where / "__init__.py"):
            if (self.root / file).is_file():
                return file.as_posix()
        return None

    def _member(self, part: Part, name: str) -> Part | None:
        node: ast.AST | None = None
        everything = []
        for statement in _statements(getattr(part.node, "body", [])):
            names = _names_of(statement)
            if name in names:
                node = statement
            if "*" in names:
                everything.append(statement)
        if isinstance(node, ast.ImportFrom):
            return self._imported(part.file, node, name)
        if node is not None:
            return Part(part.file, node, self.module(part.file).lines)
        for statement in everything:
            file = self.file_of(self._module_of(part.file, statement))
            found = None if file is None else self._member(self.module(file), name)
            if found is not None:
                return found
        for base in getattr(part.node, "bases", ()):
            if isinstance(base, ast.Name):
                above = self._member(self.module(part.file), base.id)
                found = None if above is None else self._member(above, name)
                if found is not None:
                    return found
        return None

    def _module_of(self, file: str, node: ast.AST) -> str:
        """Which module an import in `file` is from."""
        assert isinstance(node, ast.ImportFrom)
        if not node.level:
            return node.module or ""
        folders = [PACKAGE, *Path(file).parts[:-1]]
        parts = folders[: len(folders) - node.level + 1]
        return ".".join([*parts, *filter(None, [node.module])])

    def _imported(self, file: str, node: ast.ImportFrom, name: str) -> Part | None:
        original = next(a.name for a in node.names if name in (a.asname, a.name))
        module = self._module_of(file, node)
        if module.split(".")[0] != PACKAGE:
            return Part(file, node, self.module(file).lines)
        found = self.file_of(module)
        inside = None if found is None else self._member(self.module(found), original)
        if inside is None and (below := self.file_of(f"{module}.{original}")) is not None:
            return self.module(below)
        return inside


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, also under `if` and `try`."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handled = [each for handler in statement.handlers for each in handler.body]
            yield from _statements([*handled, *statement.body, *statement.orelse])
        else:
            yield statement


def _names_of(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.ImportFrom | ast.Import):
        return {alias.asname or alias.name for alias in statement.names}
    return set()
