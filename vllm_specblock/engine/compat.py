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
from collections.abc import Callable, Iterator, Sequence
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
        need: as `vllm_hooks.txt` describes it, or `from vllm.module import name`.
        breaks: what fails without it.
    """

    file: str
    need: str
    breaks: str

    def trouble(self, root: Path, parts_of: Callable[[Path], Parts]) -> str | None:
        """Return how `need` is not met in the folder `vllm` at `root`; None: it is met."""
        if not self.file:
            _, module, _, name = self.need.split()
            folder = root.joinpath(*module.split(".")[1:])
            if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
                return None
            # Names that a module imports, or loads when they are asked for, are in its text.
            path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            known = path.is_file() and re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))
            return None if known else f"{module} has no {name!r}"
        if not (path := root / self.file).is_file():
            return f"there is no {PACKAGE}/{self.file}"
        name, kind, rest = re.split(r" ?(\(|:|!?~) ?", self.need, maxsplit=1)
        if name not in (parts := parts_of(path)):
            return f"{self.file} has no {name!r}"
        names, text = parts[name]
        if kind == "(":
            wanted = re.findall(r"\.\.\.|\w+", rest)
            found = [*names[: len(wanted) - 1], "..."] if wanted[-1] == "..." else names
            return None if wanted == found else f"{name} takes ({', '.join(names)}), not ({rest}"
        if kind == ":":
            missing = ", ".join(each for each in rest.split() if each not in names)
            return f"{name} has no {missing}" if missing else None
        if any(_says(text, each) for each in rest.split(" || ")) == (kind == "~"):
            return None
        return f"{name or self.file} {'does not say' if kind == '~' else 'says'} {rest!r}"


def _says(text: str, pieces: str) -> bool:
    """Return whether the pieces, `...` between them, stand in this order in `text`."""
    squeezed = (re.escape("".join(piece.split())) for piece in pieces.split(" ... "))
    return re.search(".*".join(squeezed), "".join(text.split())) is not None


Parts = dict[str, tuple[list[str], str]]
"""Name of a class or function, such as "Class.method", or "" for a whole file → the parameters or
what the class defines, and the source."""


def parts_of(path: Path) -> Parts:
    """Return the parts of a file; of what is defined twice, as overloads are, the last counts."""
    text = path.read_text(encoding="utf-8")
    lines, found = text.splitlines(keepends=True), Parts({"": ([], text)})

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                part = "".join(lines[child.lineno - 1 : child.end_lineno])
                if isinstance(child, ast.ClassDef):
                    names = re.findall(r"(?m)(?:def |self\.|^\s+(?=\w+\s*[:=]))(\w+)", part)
                else:
                    given = ast.iter_child_nodes(child.args)
                    names = [each.arg for each in given if isinstance(each, ast.arg)]
                found[prefix + child.name] = names, part
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
                visit(child, prefix)

    visit(ast.parse(text), "")
    return found


def installed() -> Path | None:
    """Return the folder of the vLLM that Python would import; None: there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def hooks() -> tuple[Hook, ...]:
    """Return all hooks: the table, and our imports."""
    return (*_table(), *_our_imports())


def _table() -> Iterator[Hook]:
    file = breaks = ""
    text = Path(__file__).with_name("vllm_hooks.txt").read_text(encoding="utf-8")
    for line in text.replace("\n        ", " ").splitlines():
        if line.startswith("    ") and line[4] != "#":
            yield Hook(file, line.strip(), breaks)
        elif line[:1].isalnum() or line[:1] == "_":
            file, breaks = line.split(": ", 1)


def _our_imports() -> Iterator[Hook]:
    """Yield a hook on every name of vLLM's that we import, type checkers' imports included."""
    for path in sorted([*PLUGIN.glob("engine/**/*.py"), *PLUGIN.glob("cpu/*.py")]):
        user = path.relative_to(PLUGIN).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                for alias in node.names:
                    yield Hook("", f"from {node.module} import {alias.name}", user)


def broken(root: Path) -> Iterator[str]:
    """Yield a line for every hook that does not hold in the folder `vllm` at `root`."""
    parts = cache(parts_of)
    for hook in hooks():
        if trouble := hook.trouble(root, parts):
            yield f"{hook.breaks}: {trouble}" + (f" ({hook.file})" if hook.file else "")


@cache
def warn_of_broken_hooks() -> None:
    """Warn of hooks that do not hold in the installed vLLM, once per process."""
    for line in broken(installed() or Path()):
        logger.warning("vLLM differs from what SpecBlock needs, which may break %s", line)


# ---- differences between releases ----


def reallocated(cu_num_logits: torch.Tensor, query_start: torch.Tensor, budget: int) -> Any:
    """Return what the runner unpacks of `reallocate_drafts`.

    From 0.33 on a fourth value has the admitted drafts on the host, for batch-sharded sampling.
    `vllm_args.py` refuses that, and None is what vLLM itself returns without it.
    """
    # Not above: a process that builds no model would load it, too.
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    more = [None] if hasattr(adaptive_verification, "AdmittedDraftCounts") else []
    return cu_num_logits, query_start, budget, *more


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
