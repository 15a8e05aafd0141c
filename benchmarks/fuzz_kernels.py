"""Random trees through every kernel that handles trees, each held against its torch reference.

    python benchmarks/fuzz_kernels.py [--trees 10000] [--seed 0] [--kernel "selection of nodes"]
    python benchmarks/fuzz_kernels.py --triton --trees 300

Of a machine without a GPU: the compiled loops that stand in for the kernels there, or, with
--triton, the kernels themselves under Triton's interpreter, which takes some hundred times as long.
Prints a table and writes JSON; exit status 1 and the number of the case if anything differs. A case
is its seed and its number: it comes back with the same two.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lib.fuzz_case import Case
from lib.fuzz_cases import LOOPS, TRITON
from lib.results_store import MEASURED, markdown_table
from tqdm import tqdm
from vllm_specblock.triton_kernels import optional_numba

from vllm_specblock.cpu import loops

INTERPRETED = "TRITON_INTERPRET"
"""Triton's own switch, which it reads when it meets a kernel: at this process's imports."""
Form = Callable[[], AbstractContextManager[None]]

loops.register()


@contextmanager
def references():
    """Nothing compiled within."""
    there, optional_numba.AVAILABLE = optional_numba.AVAILABLE, False
    try:
        yield
    finally:
        optional_numba.AVAILABLE = there


@contextmanager
def kernels():
    """What lies in host memory is taken for a GPU's within, so that kernels are launched."""
    with references():
        torch.Tensor.is_cuda = property(lambda tensor: True)
        try:
            yield
        finally:
            del torch.Tensor.is_cuda  # of the class above it


def differs(case: Case, form: Form = nullcontext) -> str | None:
    """What is wrong with a case in a form; None: nothing."""
    with form():
        found = case.call()
    with references():
        wanted = (case.reference or case.call)()
    if len(found) != len(wanted):
        return f"{len(found)} results, not {len(wanted)}"
    for place, (one, other) in enumerate(zip(found, wanted)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"result {place} is {one.dtype} {list(one.shape)}, not {list(other.shape)}"
        atol = case.atol if one.is_floating_point() else 0
        if not torch.allclose(one, other, rtol=0, atol=atol):  # NaN is not, infinity is
            return f"result {place} differs in {int((one != other).sum())} of {one.numel()}"
    return None


def fuzz(
    make: Callable[[random.Random, torch.Generator], Case],
    trees: int,
    seed: int,
    name: str = "",
    form: Form = nullcontext,
) -> dict[str, Any]:
    """Cases until so many trees went through a form.

    Returns:
        `trees`, `cases`, and the `wrong` ones: their numbers and what differed.
    """
    done, number, wrong = 0, 0, []
    with tqdm(total=trees, desc=name, unit="tree", leave=False) as bar:
        while done < trees:
            of_case = seed * 1_000_003 + number
            case = make(random.Random(of_case), torch.Generator().manual_seed(of_case))
            said = differs(case, form)
            if said is not None:
                wrong.append({"case": number, "said": said})
            done, number = done + case.trees, number + 1
            bar.update(case.trees)
    return {"trees": done, "cases": number, "wrong": wrong}


def interpreted(arguments: list[str]) -> int:
    """This command in a process that interprets every kernel; its exit status."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, env=os.environ | {INTERPRETED: "1"}).returncode


def prepare_interpreter() -> list[str]:
    """Names of the kernels that it interprets from now on."""
    import triton.runtime.interpreter as interpreter
    from lib.interpreter import note_launches, teach_bf16_dot, teach_whole_arrays

    teach_bf16_dot(interpreter)
    teach_whole_arrays(interpreter)
    return note_launches(interpreter)


def main(
    trees: Annotated[int, typer.Option(min=1, help="Through each kernel.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    kernel: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    triton: Annotated[bool, typer.Option(help="Triton's kernels, interpreted.")] = False,
    out: Annotated[Path, typer.Option(help="JSON.")] = MEASURED / "fuzz_kernels.json",
) -> None:
    """Draw trees, compare, print a table."""
    cases = TRITON if triton else LOOPS
    unknown = set(kernel or ()) - set(cases)
    if unknown:
        raise typer.BadParameter(
            f"There is no kernel {unknown.pop()!r}; there are {', '.join(cases)}."
        )
    if triton and os.environ.get(INTERPRETED) != "1":
        raise typer.Exit(interpreted(sys.argv[1:]))
    if not triton and not optional_numba.AVAILABLE:
        raise SystemExit("numba is not installed: there are no compiled forms to be compared.")
    form, launched = (kernels, prepare_interpreter()) if triton else (nullcontext, None)
    results = {}
    for name in kernel or cases:
        results[name] = fuzz(cases[name], trees, seed, name, form)
        if launched is not None:
            results[name]["launches"] = dict(Counter(launched))
            if not launched:
                raise SystemExit(f"No kernel was launched for {name!r}: this tested nothing.")
            launched.clear()
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {"seed": seed, "form": "Triton" if triton else "loops", "kernels": results}
    out.write_text(json.dumps(found, indent=1))
    rows = [["kernel", "trees", "cases", "wrong"]]
    rows += [
        [name, f"{each['trees']:,}", f"{each['cases']:,}", str(len(each["wrong"]))]
        for name, each in results.items()
    ]
    print(markdown_table(rows))
    first = next(((n, each["wrong"][0]) for n, each in results.items() if each["wrong"]), None)
    if first is not None:
        print(f"{first[0]}, case {first[1]['case']}: {first[1]['said']}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
