"""Compile launches ahead of time, for GPUs that are not there.

    .venv-cuda/bin/python tests/emulated_gpu/compile_launches.py [FILE]

Compiles attention, growth and selection at Llama-3.1-8B's shapes for each architecture, and the
launches in FILE, which `EMU_RECORD_LAUNCHES=FILE run.py …` writes. What a program takes goes to
`compiled.json`: registers, bytes spilled, accesses to spilled registers in loops with products,
shared memory. Exits with 1 if one does not fit its GPU or a loop spills. Needs no GPU.
The table keeps a hash of the kernels' code, by which a test notices a table that is out of date.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).with_name("path")))
sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from emulated_gpu.launch_records import argument, launch_record
from support.compiled import RELOADS, SHARED, compile_for, resources

TABLE = Path(__file__).with_name("compiled.json")
KERNELS = Path(__file__).parents[2] / "triton_kernels"
LOOPS = ("_tree_attention_kernel", "_attach_and_select_kernel", "_select_kernel")
"""Kernels that may not spill: attention, growth and selection."""
HASHED = (*LOOPS, "_merge_splits_kernel", "_attach_and_start_kernel", "tile_classes",
          "SelectConstants", "warps_for")  # fmt: skip
"""Kernels of the table, and what chooses their constants."""


class Recorder:
    """Stands in for a kernel: keeps its launches as `EMU_RECORD_LAUNCHES` does."""

    def __init__(self, kernel: Any, lines: list[str]) -> None:
        self.kernel, self.lines = kernel, lines

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *positional: Any, num_warps: int = 4, num_stages: int = 3, **named: Any):
        given = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
        constants = {p.name for p in self.kernel.params if p.is_constexpr}
        options = {"num_warps": num_warps, "num_stages": num_stages}
        self.lines.append(launch_record(self.kernel.fn, given, constants, options))


def code_hash() -> str:
    """Hash `HASHED` and each definition that they name, without comments and docstrings."""
    defined: dict[str, list[ast.stmt]] = {}
    for path in sorted(KERNELS.rglob("*.py")):
        if path.stem.startswith("cpu_") or path.stem.endswith("_numba"):
            continue
        for node in ast.parse(path.read_text()).body:
            targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
            names = [getattr(node, "name", None), *(getattr(each, "id", None) for each in targets)]
            for name in filter(None, names):
                defined.setdefault(name, []).append(node)
    code: dict[str, list[str]] = {}
    wanted = list(HASHED)
    while wanted:
        if (name := wanted.pop()) not in code:
            code[name] = [without_docstrings(node) for node in defined.get(name, ())]
            wanted += [each for node in defined.get(name, ()) for each in globals_of(node)]
    assert all(code[name] for name in HASHED)
    return hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()


def without_docstrings(node: ast.stmt) -> str:
    for each in ast.walk(node):
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(each):
            each.body = each.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def globals_of(node: ast.stmt) -> set[str]:
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    local = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    local |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return {each.id for each in names} - local


def llama_launches(architecture: int) -> list[str]:
    """Record attention, growth and selection of Llama-3.1-8B: 32 heads of 128, N = 60, M = 2."""
    from vllm_specblock.triton_kernels.attention import attention_schedule
    from vllm_specblock.triton_kernels.attention import tree_attention as attention
    from vllm_specblock.triton_kernels.drafting import expand
    from vllm_specblock.triton_kernels.tree import select_tree

    lines: list[str] = []
    kernels = {attention: ["_tree_attention_kernel", "_merge_splits_kernel"],
               expand: ["_attach_and_start_kernel", "_attach_and_select_kernel"],
               select_tree: ["_select_kernel"]}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_schedule, "shared_memory", lambda _: SHARED[architecture])
        patch.setattr(attention_schedule, "generation", lambda _: architecture // 10)
        for module, names in kernels.items():
            for name in names:
                patch.setattr(module, name, Recorder(getattr(module, name), lines))
        launch_attention(attention, torch.bfloat16)
        if architecture == 90:  # for FlashAttention 3
            launch_attention(attention, torch.float8_e4m3fn)
        launch_llama(expand, select_tree)
    return list(dict.fromkeys(lines))


def launch_attention(attention: Any, dtype: torch.dtype) -> None:
    one = torch.ones(()) if dtype.itemsize == 1 else None
    for requests, unknown in ((1, 0), (32, 0), (32, 61)):
        rows = torch.zeros(requests * 61, dtype=torch.int32)
        query = torch.empty(len(rows), 32, 128, dtype=dtype)
        cache = torch.empty(8, 16, 8, 256, dtype=dtype).transpose(1, 2)
        seen = attention.VisibleEntries(
            torch.zeros(requests, 2048, dtype=torch.int32), rows[: requests + 1], rows[:requests],
            rows, None, torch.zeros(len(rows), 1).long(), rows[:requests],
        )  # fmt: skip
        bounds = attention.BatchBounds({61}, 32768, unknown)
        scores = attention.ScoreOptions(0.1, 0.0, one, one, None, one)
        out = torch.empty_like(query, dtype=torch.bfloat16)
        attention.tree_attention_triton(query, cache, seen, bounds, scores, out)


def launch_llama(expand: Any, select_tree: Any) -> None:
    growing = expand.Growing(expand.TreeShape(4, 2, 4, (4, 4, 4, 4), 60), torch.zeros(4).long(), 1)

    def block(rows: int) -> tuple[torch.Tensor, ...]:
        token = torch.zeros(1, rows, 4, 4, dtype=torch.int64)
        return token.float(), token, token[..., 0]

    growing.attach(growing.attach(None, *block(1)), *block(4))
    levels = expand.Growing(expand.TreeShape.levels(8, 10, 8, 60), torch.zeros(4).long(), 1)
    grown = levels.attach(None, torch.zeros(1, 1, 1, 10), torch.zeros(1, 1, 1, 10).long())
    for _ in range(7):
        said = torch.zeros(1, 8, 1, 10, dtype=torch.int64)
        grown = levels.attach(grown, said.float(), said)
    whole = torch.zeros(1, 577, dtype=torch.int64)
    given = select_tree.Candidates(whole, whole, whole.float(), whole, whole)
    select_tree.select_triton(given, 60, 12)


def faults(table: list[dict[str, Any]]) -> list[str]:
    """Say which compiled launches do not fit their GPU, and which loops spill."""
    found = []
    for row in table:
        name = f"{row['kernel']} for sm_{row['architecture']}"
        if row["shared"] > SHARED[row["architecture"]]:
            found.append(f"{name}: {row['shared']} bytes of shared memory")
        allowed = RELOADS.get(row["architecture"], 0)
        if row["in_loops"] > allowed and row["kernel"].endswith(LOOPS):
            found.append(f"{name}: {row['in_loops']} accesses to spilled registers")
    return found


def main() -> None:
    recorded = Path(sys.argv[1]).read_text().splitlines() if sys.argv[1:] else []
    table = []
    for architecture in SHARED:
        for line in dict.fromkeys([*llama_launches(architecture), *recorded]):
            launch = json.loads(line)
            module, _, name = launch["kernel"].rpartition(".")
            kernel = getattr(importlib.import_module(module), name)
            named = {key: argument(value) for key, value in launch["arguments"].items()}
            took = resources(compile_for(architecture, kernel, **named, **launch["options"]))
            row = {"kernel": launch["kernel"], "architecture": architecture, **took}
            print(json.dumps(row), flush=True)
            table.append(row | {"launch": line})
    table.sort(key=lambda row: (row["kernel"], row["architecture"], row["launch"]))
    rows = ",\n".join(map(json.dumps, table))
    TABLE.write_text(f'{{"code": "{code_hash()}", "launches": [\n{rows}\n]}}\n')
    wrong = faults(table)
    print(f"{len(table)} compiled", *wrong, sep="\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
