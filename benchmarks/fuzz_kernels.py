"""Random trees through every kernel that handles trees, each held against its torch reference.

    python benchmarks/fuzz_kernels.py [--trees 10000] [--seed 0] [--kernel "selection of nodes"]
    python benchmarks/fuzz_kernels.py --triton --trees 300

Needs no GPU: runs the compiled loops for CPUs, or, with --triton, the kernels under Triton's
interpreter, which takes some hundred times as long. Prints a table and writes JSON; exit status 1
and the number of the case if anything differs. Seed and number give the same case again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from lib.fuzz_cases import LOOPS, TRITON, Case, Maker
from lib.interpreter import note_launches, teach
from lib.options import known
from lib.results_store import MEASURED, markdown_table, write_results
from tqdm import tqdm
from vllm_specblock.triton_kernels import optional_numba

from vllm_specblock.cpu import loops

INTERPRETED = "TRITON_INTERPRET"
"""Triton's own switch, which it reads when it meets a kernel: at this process's imports."""
Form = Callable[[], AbstractContextManager[None]]
Found = dict[str, Any]

loops.register()


def references() -> AbstractContextManager[Any]:
    """Run without compiled loops."""
    return patch.object(optional_numba, "AVAILABLE", False)


@contextmanager
def kernels():
    """Launch kernels: host memory passes for a GPU's."""
    on_gpu = property(lambda tensor: True)
    with references(), patch.object(torch.Tensor, "is_cuda", on_gpu):
        yield


def differs(case: Case, form: Form = nullcontext) -> str | None:
    """Return how a case in a form differs from the references; None: not at all."""
    with form():
        found = case.call()
    with references():
        wanted = (case.reference or case.call)()
    try:
        torch.testing.assert_close(found, wanted, rtol=0, atol=case.atol)
    except AssertionError as error:
        return str(error)
    return None


def fuzz(make: Maker, trees: int, seed: int, name: str = "", form: Form = nullcontext) -> Found:
    """Draw cases until so many trees went through a form; the wrong ones have what differed."""
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


def main(
    trees: Annotated[int, typer.Option(min=1, help="Through each kernel.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    kernel: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    triton: Annotated[bool, typer.Option(help="Triton's kernels, interpreted.")] = False,
    out: Annotated[Path, typer.Option(help="JSON.")] = MEASURED / "fuzz_kernels.json",
) -> None:
    """Draw trees, compare, print a table."""
    cases = TRITON if triton else LOOPS
    chosen = known("kernel", kernel, cases)
    if triton and os.environ.get(INTERPRETED) != "1":
        # In a process that interprets every kernel.
        command = [sys.executable, *sys.argv]
        raise typer.Exit(subprocess.run(command, env=os.environ | {INTERPRETED: "1"}).returncode)
    if not triton and not optional_numba.AVAILABLE:
        raise SystemExit("numba is not installed: there are no compiled forms to be compared.")
    form, launched = nullcontext, None
    if triton:
        from triton.runtime import interpreter

        teach(interpreter)
        form, launched = kernels, note_launches(interpreter)
    results = {}
    for name in chosen:
        results[name] = fuzz(cases[name], trees, seed, name, form)
        if launched is not None:
            results[name]["launches"] = dict(Counter(launched))
            if not launched:
                raise SystemExit(f"No kernel was launched for {name!r}: this tested nothing.")
            launched.clear()
    found = {"seed": seed, "form": "Triton" if triton else "loops", "kernels": results}
    write_results(out, found)
    rows = [["kernel", "trees", "cases", "wrong"]]
    for name, each in results.items():
        counts = each["trees"], each["cases"], len(each["wrong"])
        rows.append([name, *(f"{count:,}" for count in counts)])
    print(markdown_table(rows))
    for name, each in results.items():
        if each["wrong"]:
            first = each["wrong"][0]
            print(f"{name}, case {first['case']}: {first['said']}")
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
