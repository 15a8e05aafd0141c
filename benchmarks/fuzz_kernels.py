"""Random trees through every kernel that handles trees, each held against its torch reference.

    python benchmarks/fuzz_kernels.py [--trees 10000] [--seed 0] [--kernel "n-gram trees"]

Of a machine without a GPU: the compiled loops that stand in for the kernels there. Prints a table
and writes JSON; exit status 1 and the number of the case if anything differs. A case is its seed
and its number: it comes back with the same two.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lib.fuzz_cases import CASES, Case
from lib.results_store import MEASURED, markdown_table
from tqdm import tqdm
from vllm_specblock.triton_kernels import optional_numba


@contextmanager
def references():
    """Nothing compiled within."""
    there, optional_numba.AVAILABLE = optional_numba.AVAILABLE, False
    try:
        yield
    finally:
        optional_numba.AVAILABLE = there


def differs(case: Case) -> str | None:
    """What is wrong with a case; None: nothing."""
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
    make: Callable[[random.Random, torch.Generator], Case], trees: int, seed: int, name: str = ""
) -> dict[str, Any]:
    """Cases until so many trees went through.

    Returns:
        `trees`, `cases`, and the `wrong` ones: their numbers and what differed.
    """
    done, number, wrong = 0, 0, []
    with tqdm(total=trees, desc=name, unit="tree", leave=False) as bar:
        while done < trees:
            of_case = seed * 1_000_003 + number
            case = make(random.Random(of_case), torch.Generator().manual_seed(of_case))
            said = differs(case)
            if said is not None:
                wrong.append({"case": number, "said": said})
            done, number = done + case.trees, number + 1
            bar.update(case.trees)
    return {"trees": done, "cases": number, "wrong": wrong}


def main(
    trees: Annotated[int, typer.Option(min=1, help="Through each kernel.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    kernel: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="JSON.")] = MEASURED / "fuzz_kernels.json",
) -> None:
    """Draw trees, compare, print a table."""
    unknown = set(kernel or ()) - set(CASES)
    if unknown:
        raise typer.BadParameter(
            f"There is no kernel {unknown.pop()!r}; there are {', '.join(CASES)}."
        )
    if not optional_numba.AVAILABLE:
        raise SystemExit("numba is not installed: there are no compiled forms to be compared.")
    results = {name: fuzz(CASES[name], trees, seed, name) for name in kernel or CASES}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"seed": seed, "kernels": results}, indent=1))
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
