"""Kernels compiled ahead of time, for GPUs that are not there, and what a program takes of one."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a block may use, by architecture."""
RELOADS = {80: 1, 120: 8}
"""Accesses to spilled registers that a loop of attention may have where one program reads all
splits: on sm_80 with Triton 3.8, on sm_120 with 3.7. All other loops have none."""


class Compile:
    """Stands in for a kernel: compiles it for the arguments that it is launched with."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability, self.compiled = kernel, capability, []

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *positional: Any, **named: Any) -> None:
        kernel = self.kernel
        unspecialised = set(kernel.do_not_specialize)
        assert unspecialised <= set(kernel.arg_names), "Triton ignores a name that it does not find"
        given = dict(zip(kernel.arg_names, positional)) | named
        groups = {name: type(x) for name, x in given.items() if isinstance(x, tuple)}
        assert not unspecialised & groups.keys(), "Triton heeds it for no group"
        for kind in groups.values():  # some releases of Triton look for names in it alone
            assert "_fields" in vars(kind) or not hasattr(kind, "_fields"), kind
        self.compiled.append(compile_for(self.capability, kernel, *positional, **named))


def compile_for(capability: int, kernel: Any, *positional: Any, **named: Any) -> Any:
    """Compile a kernel for the arguments and options of a launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    # As a launch finds out what is 1, what is absent and what is aligned.
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, found, options = bind(*positional, **named)
    options, *source = kernel._pack_args(backend, named, bound, found, options)
    return compile(ASTSource(kernel, *source), target=target, options=options.__dict__)


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
    """Count accesses to spilled registers in loops with tensor core products.

    All of a program's, where there is no such loop. A loop is code that reaches itself. Line
    numbers do not show it: the compiler moves rare paths of a loop behind the rest of the program.
    """
    blocks, start = [""], {}
    for line in assembly.splitlines():
        if found := re.match(r"(\.L_x_\d+):", line):
            start[found[1]] = len(blocks)
            blocks.append("")
        blocks[-1] += f"{line}\n"
        if re.search(r"\b(BRA|BSSY|CALL|EXIT|RET)\b", line):
            blocks.append("")
    after: list[set[int]] = []
    for number, block in enumerate(blocks, 1):
        labels = re.findall(r"\b(?:BRA|BSSY|CALL)\b.*`\((\.L_x_\d+)\)", block)
        ends = number == len(blocks) or re.search(r"\*/ +(EXIT|RET|BRA\S* `)", block)
        after.append({start[label] for label in labels} | (set() if ends else {number}))
    reached = [reachable(after, number) for number in range(len(blocks))]
    looping = [
        block
        for number, block in enumerate(blocks)
        if any("MMA" in blocks[each] and number in reached[each] for each in reached[number])
        and number in reached[number]
    ]
    return sum(len(re.findall(r"\b(?:LDL|STL)\b", block)) for block in looping or blocks)


def reachable(after: list[set[int]], number: int) -> set[int]:
    """Return the blocks that run at some time after block `number`."""
    found: set[int] = set()
    new = after[number]
    while new:
        found |= new
        new = {each for block in new for each in after[block]} - found
    return found
