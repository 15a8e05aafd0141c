"""Compile attention, growth and selection ahead of time, for GPUs that are not there.

    .venv/bin/python tests/emulated_gpu/compile_launches.py

Takes Llama-3.1-8B's shapes: 32 heads of 128, N = 60, M = 2. Prints what a program of each launch
takes: registers, bytes spilled, accesses to spilled registers in loops with products, shared
memory. Exits with 1 if one does not fit its GPU or a loop spills. Needs no GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a block may use, by architecture."""
RELOADS = {120: 8}
"""Accesses to spilled registers that a loop may have: in 99 KB, blocks of twice as many entries
would have none, and no load on its way."""
LOOPS = ("_tree_attention_kernel", "_attach_and_select_kernel", "_attach_and_grow_kernel",
         "_select_kernel")  # fmt: skip
"""Kernels that may not spill: attention, growth and selection."""


class Compile:
    """Stands in for a kernel: compiles it for the arguments that it is launched with."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability, self.compiled = kernel, capability, []

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *positional: Any, **named: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile, make_backend
        from triton.runtime.jit import create_function_from_signature

        kernel, target = self.kernel, GPUTarget("cuda", self.capability, 32)
        unspecialised = set(kernel.do_not_specialize)
        assert unspecialised <= set(kernel.arg_names), "Triton ignores a name that it does not find"
        given = dict(zip(kernel.arg_names, positional)) | named
        groups = {name: type(x) for name, x in given.items() if isinstance(x, tuple)}
        assert not unspecialised & groups.keys(), "Triton heeds it for no group"
        for kind in groups.values():  # Triton before 3.7 looks for names in it alone
            assert "_fields" in vars(kind) or not hasattr(kind, "_fields"), kind
        backend = make_backend(target)
        # As a launch finds out what is 1, what is absent and what is aligned.
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, found, options = bind(*positional, **named)
        options, *source = kernel._pack_args(backend, named, bound, found, options)
        source = ASTSource(kernel, *source)
        self.compiled.append(compile(source, target=target, options=options.__dict__))


def llama_launches(architecture: int) -> list[Compile]:
    """Compile attention, growth and selection."""
    from vllm_specblock.triton_kernels.attention import attention_schedule
    from vllm_specblock.triton_kernels.attention import tree_attention as attention
    from vllm_specblock.triton_kernels.drafting import expand, grow_level
    from vllm_specblock.triton_kernels.tree import select_tree

    modules = attention, expand, grow_level, select_tree
    made = {
        (module, name): Compile(getattr(module, name), architecture)
        for module in modules
        for name in vars(module)
        if name.endswith("_kernel")
    }
    replaced = [(*where, each) for where, each in made.items()] + [
        (attention_schedule, "shared_memory", lambda device: SHARED[architecture]),
        (attention_schedule, "generation", lambda device: architecture // 10),
    ]
    with ExitStack() as stack:
        for each in replaced:
            stack.enter_context(patch.object(*each))
        launch_llama(*modules)
    return list(made.values())


def launch_llama(attention: Any, expand: Any, grow_level: Any, select_tree: Any) -> None:
    for requests, unknown in ((1, 0), (32, 0), (32, 61)):
        rows = torch.zeros(requests * 61, dtype=torch.int32)
        query = torch.empty(len(rows), 32, 128, dtype=torch.bfloat16)
        cache = torch.empty(8, 16, 8, 256, dtype=torch.bfloat16).transpose(1, 2)
        seen = attention.VisibleEntries(
            torch.zeros(requests, 2048, dtype=torch.int32), rows[: requests + 1], rows[:requests],
            rows, None, torch.zeros(len(rows), 1).long(), rows[:requests],
        )  # fmt: skip
        bounds = attention.BatchBounds({61}, 32768, unknown)
        scores = attention.ScoreOptions(0.1)
        attention.tree_attention_triton(query, cache, seen, bounds, scores, torch.empty_like(query))
    growing = expand.Growing(expand.TreeShape(4, 2, 4, (4, 4, 4, 4), 60), torch.zeros(4).long(), 1)

    def block(rows: int) -> tuple[torch.Tensor, ...]:
        token = torch.zeros(1, rows, 4, 4, dtype=torch.int64)
        return token.float(), token, token[..., 0]

    growing.attach(growing.attach(None, *block(1)), *block(4))
    levels = grow_level.GrowingLevels(grow_level.LevelLimits(8, 10, 8, 60), torch.zeros(1).long())
    grown = levels.attach(None, None, torch.zeros(1, 1, 10), torch.zeros(1, 1, 10).long())
    for _ in range(7):
        said = torch.zeros(1, 8, 10, dtype=torch.int64)
        grown = levels.attach(grown, None, said.float(), said)
    whole = torch.zeros(1, 577, dtype=torch.int64)
    select_tree.select_triton(whole, whole, whole.float(), whole, whole, 60, 12)


def resources(compiled: Any) -> dict[str, int]:
    """Return registers of a thread, bytes that it spills, and bytes of shared memory of a block."""
    tools = Path(sys.modules["triton"].__file__ or "").parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def shown(*command: str | Path) -> str:
            command = (*command, file.name)
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = shown(tools / "cuobjdump", "--dump-resource-usage")
        (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
        in_loops = spills_in_loops(shown(tools / "nvdisasm", "-c")) if int(stack) else 0
    return {
        "registers": int(registers),
        "spilled": int(stack),
        "in_loops": in_loops,
        "shared": compiled.metadata.shared,
    }


def spills_in_loops(assembly: str) -> int:
    """Count accesses to spilled registers in innermost loops with tensor core products.

    All of a program's, where there is no such loop.
    """
    label, loops, lines = {}, [], assembly.splitlines()
    for number, line in enumerate(lines):
        if found := re.match(r"(\.L_x_\d+):", line):
            label[found[1]] = number
        elif (found := re.search(r"BRA.*(\.L_x_\d+)\)", line)) and found[1] in label:
            loops.append(range(label[found[1]], number))
    innermost = [loop for loop in loops if not any(other.start in loop[1:] for other in loops)]
    bodies = [lines[loop.start : loop.stop] for loop in innermost]
    bodies = [body for body in bodies if any("MMA" in line for line in body)] or [lines]
    return sum(bool(re.search(r"\b(LDL|STL)", line)) for body in bodies for line in body)


def fault(kernel: Any, architecture: int, took: dict[str, int]) -> str | None:
    """Say why a compiled launch does not fit its GPU, or that its loop spills."""
    if took["shared"] > SHARED[architecture]:
        return f"{took['shared']} bytes of shared memory"
    if kernel.__name__ in LOOPS and took["in_loops"] > RELOADS.get(architecture, 0):
        return f"{took['in_loops']} accesses to spilled registers"
    return None


def main() -> None:
    faults = 0
    for architecture in SHARED:
        for each in llama_launches(architecture):
            for compiled in each.compiled:
                took = resources(compiled)
                wrong = fault(each.kernel, architecture, took)
                faults += wrong is not None
                print(f"sm_{architecture}", each.kernel.__name__, took, wrong or "", flush=True)
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
