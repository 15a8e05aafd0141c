"""What our own sources say: the names that they import of vLLM, the kernels that they replace."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_specblock.engine.contract.hook import Hook
from vllm_specblock.engine.contract.sources import PACKAGE, NotThere, Part, Sources

ENGINE = Path(__file__).resolve().parents[1]
KERNELS = "cpu/kernels.py"


@dataclass(frozen=True)
class Imports(Hook):
    """A name that we import.

    Attributes:
        module: of vLLM, dotted.
    """

    module: str

    def trouble(self, sources: Sources) -> str | None:
        if sources.file_of(f"{self.module}.{self.name}") is not None:
            return None
        file = sources.file_of(self.module)
        if file is None:
            return f"there is no module {self.module}"
        try:
            sources.find(file, self.name)
        except NotThere as missing:
            # Names that a module hands out when they are asked for stand in it as text.
            return None if f'"{self.name}"' in sources.module(file).text else str(missing)
        return None


def our_imports() -> Iterator[Imports]:
    """Of every module of `engine/`, those for type checkers included."""
    for path in sorted(ENGINE.rglob("*.py")):
        user = path.relative_to(ENGINE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                for alias in node.names:
                    yield Imports(alias.name, node.module or "", user=user)


@dataclass(frozen=True)
class Replaces(Hook):
    """A kernel that a function of ours stands for.

    Attributes:
        least, most: arguments that ours takes by position.
    """

    least: int
    most: int

    def look(self, part: Part) -> str | None:
        count = len(part.arguments)
        if self.least <= count <= self.most:
            return None
        return f"{self.name} takes {count} arguments, and ours {self.least} to {self.most}"


def replaced_kernels() -> Iterator[Replaces]:
    """As `cpu/kernels.py` has them."""
    tree = ast.parse((ENGINE / KERNELS).read_text(encoding="utf-8"))
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    (table,) = (value for value in tables if isinstance(value, ast.Dict))
    functions: dict[str, dict[str, ast.FunctionDef]] = {}
    for key, value in zip(table.keys, table.values):
        assert isinstance(key, ast.BinOp) and isinstance(key.right, ast.Constant)
        assert isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name)
        module, _, kernel = str(key.right.value).rpartition(".")
        ours = f"cpu/{value.value.id}.py"
        if ours not in functions:
            body = ast.parse((ENGINE / ours).read_text(encoding="utf-8")).body
            functions[ours] = {f.name: f for f in body if isinstance(f, ast.FunctionDef)}
        function = functions[ours][value.attr]
        # How many warps a launch has is no argument of the kernel's.
        names = [a.arg for a in function.args.args if a.arg != "num_warps"]
        optional = len(function.args.defaults) - (len(function.args.args) - len(names))
        file = f"v1/worker/gpu/{module.replace('.', '/')}.py"
        yield Replaces(kernel, len(names) - optional, len(names), user=ours, file=file)
