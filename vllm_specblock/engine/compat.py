"""What we rely on in vLLM's internals, and differences between its releases.

`vllm_hooks.txt` is checked against source text, which is never imported: the installed release
when an engine starts and in `specblock doctor`, any other with `make contract VLLM=0.33.0`.

No other module depends on the release. An argument that a release only adds is accepted and ignored
where it occurs. To drop a release, drop its branches at the end of this file.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.block_table import BlockTables

logger = logging.getLogger("vllm.specblock")

PACKAGE = "vllm"
PLUGIN = Path(__file__).resolve().parents[1]


class Hook(NamedTuple):
    """A part of vLLM that we rely on.

    Attributes:
        file: in the folder `vllm`; "" for an import.
        need: one of
            `name(a, b)`: a function with these parameters; a last `...` stands for others;
            `name: a b`: a class that defines these names or sets them on `self`, or a function with
                these parameters;
            `name ~ text ... text`: source with these pieces in this order, white space aside;
            `name ~ text || text`: source with one of them; `name !~ text`: source without it;
            `from vllm.module import name`. Without a name the whole file is meant.
        breaks: what fails without it.
    """

    file: str
    need: str
    breaks: str

    def trouble(self, sources: Sources) -> str | None:
        """Return how `need` is not met, in a clause; None: it is met."""
        if self.need.startswith("from "):
            _, module, _, name = self.need.split()
            return sources.import_trouble(module, name)
        name, kind, rest = re.split(r" ?(\(|:|!?~) ?", self.need, maxsplit=1)
        part = sources.find(self.file, name)
        if isinstance(part, str):
            return part
        trouble = ""
        if kind == "(":
            wanted, found = re.findall(r"\.\.\.|\w+", rest), part.parameters
            if wanted[-1] == "...":
                wanted, found = wanted[:-1], found[: len(wanted) - 1]
            if wanted != found:
                trouble = f"takes ({', '.join(part.parameters)}), not ({rest}"
        elif kind == ":":
            members = part.members
            if missing := [each for each in rest.split() if each not in members]:
                trouble = f"has no {', '.join(missing)}"
        elif any(_says(part.text, each) for each in rest.split(" || ")) == (kind == "!~"):
            trouble = f"says {rest!r} now" if kind == "!~" else f"does not say {rest!r}"
        return f"{name or self.file} {trouble}" if trouble else None


def _says(text: str, pieces: str) -> bool:
    """Return whether the pieces, `...` between them, stand in this order in `text`."""
    squeezed = (re.escape("".join(piece.split())) for piece in pieces.split(" ... "))
    return re.search(".*".join(squeezed), "".join(text.split())) is not None


class Part(NamedTuple):
    """A class, a function or a whole module, and its source."""

    node: Any
    text: str

    @property
    def parameters(self) -> list[str]:
        """Names of a function's parameters, in the order of its signature."""
        given = getattr(self.node, "args", ast.Pass())
        return [each.arg for each in ast.iter_child_nodes(given) if isinstance(each, ast.arg)]

    @property
    def members(self) -> list[str]:
        """Parameters of a function; names that a class defines."""
        if isinstance(self.node, ast.FunctionDef):
            return self.parameters
        return re.findall(r"(?m)(?:def |self\.|^\s+(?=\w+\s*[:=]))(\w+)", self.text)


class Sources:
    """The folder `vllm` of an installation, or of a wheel that was unpacked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Part] = {}

    def find(self, file: str, name: str) -> Part | str:
        """Return what `file` defines as `name`, such as "Class.method"; a clause if it does not.

        Of what is defined twice, as overloads are, the last counts.
        """
        if not (self.root / file).is_file():
            return f"there is no {PACKAGE}/{file}"
        if file not in self._modules:
            text = (self.root / file).read_text(encoding="utf-8")
            self._modules[file] = Part(ast.parse(text), text)
        part = module = self._modules[file]
        for each in name.split(".") if name else ():
            found = [node for node in _definitions(part.node) if node.name == each]
            if not found:
                return f"{file} has no {name!r}"
            node = found[-1]
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines = module.text.splitlines(keepends=True)[first - 1 : node.end_lineno]
            part = Part(node, "".join(lines))
        return part

    def import_trouble(self, module: str, name: str) -> str | None:
        """Return why `name` cannot be imported from `module`, in a clause; None: it can."""
        folder = self.root.joinpath(*module.split(".")[1:])
        files = [*filter(Path.is_file, (folder.with_suffix(".py"), folder / "__init__.py"))]
        if not files:
            return f"there is no module {module}"
        if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
            return None
        # Names that a module imports, or loads when they are asked for, are in its text.
        text = files[0].read_text(encoding="utf-8")
        if "import *" in text:
            text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
        return None if re.search(rf"\b{name}\b", text) else f"{module} has no {name!r}"


def _definitions(node: ast.AST) -> Iterator[Any]:
    """Yield the classes and functions of a module or class, those under `if` and `try` included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from _definitions(child)


def installed() -> Path | None:
    """Return the folder of the vLLM that Python would import; None: there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) if folders else None


@cache
def hooks() -> tuple[Hook, ...]:
    """Return all hooks: the table, and our imports."""
    return (*table(), *our_imports())


def table() -> Iterator[Hook]:
    """Yield the hooks of `vllm_hooks.txt`."""
    file = breaks = ""
    text = Path(__file__).with_name("vllm_hooks.txt").read_text(encoding="utf-8")
    for line in text.replace("\n        ", " ").splitlines():
        if line.startswith("    ") and line[4] != "#":
            yield Hook(file, line.strip(), breaks)
        elif line[:1].isalnum() or line[:1] == "_":
            file, breaks = line.split(": ", 1)


def broken(root: Path) -> Iterator[str]:
    """Yield a line for every hook that does not hold in the folder `vllm` at `root`."""
    sources = Sources(root)
    for hook in hooks():
        trouble = hook.trouble(sources)
        if trouble is not None:
            where = f" ({hook.file})" if hook.file else ""
            yield f"{hook.breaks}: {trouble}{where}"


@cache
def warn_of_broken_hooks() -> None:
    """Warn of hooks that do not hold in the installed vLLM, once per process."""
    for line in broken(installed() or Path()):
        logger.warning("vLLM differs from what SpecBlock needs, which may break %s", line)


def our_imports() -> Iterator[Hook]:
    """Yield a hook on every name of vLLM's that we import, type checkers' imports included."""
    for path in sorted([*PLUGIN.glob("engine/**/*.py"), *PLUGIN.glob("cpu/*.py")]):
        user = path.relative_to(PLUGIN).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                for alias in node.names:
                    yield Hook("", f"from {node.module} import {alias.name}", user)


# ---- differences between releases ----


def reallocated(cu_num_logits: torch.Tensor, query_start: torch.Tensor, budget: int) -> Any:
    """Return what the runner unpacks of `reallocate_drafts`.

    From 0.33 on a fourth value has the admitted drafts on the host, for batch-sharded sampling.
    `validate.py` refuses that, and None is what vLLM itself returns without it.
    """
    # Not above: a process that builds no model would load it, too.
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    if hasattr(adaptive_verification, "AdmittedDraftCounts"):
        return cu_num_logits, query_start, budget, None
    return cu_num_logits, query_start, budget


def window_reach(tables: BlockTables) -> Sequence[int]:
    """Return per group of caches the tokens before a step's first that its windows see; 0: all.

    From 0.33 on the blocks before those are not in a step's tables: another request may own them.
    """
    reach: Sequence[int] | None = getattr(tables, "_sliding_window_reach", None)
    return reach if reach is not None else [0] * len(tables.block_tables)


def rows_left_over(tables: BlockTables, num_reqs: int) -> int:
    """Return how many rows the previous step filled; this step fills `num_reqs`.

    vLLM ≥ 0.33 clears the rows between.
    """
    before: int = getattr(tables, "_num_dirty_rows", 0)
    tables._num_dirty_rows = num_reqs
    return before
