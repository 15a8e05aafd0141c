"""Where the kernels run: compiled where CUDA is, under Triton's interpreter elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from lib.interpreter import teach
from vllm_specblock.triton_kernels import optional_numba

from vllm_specblock import triton_kernels
from vllm_specblock.cpu import triton_interpreter

PACKAGE = "vllm_specblock.triton_kernels"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sm", type=int, default=90, help="architecture that kernels compile for")


def module_of(name: str) -> str:
    """The full name of the kernel module `name`, whichever room it is in."""
    (path,) = Path(triton_kernels.__file__).parent.glob(f"*/{name}.py")
    return f"{PACKAGE}.{path.parent.name}.{name}"


class Kernels:
    """Gives a kernel's module in the form that runs on `device`."""

    def __init__(self, device: str):
        self.device = torch.device(device)
        self.interpreted = device == "cpu" or os.environ.get("TRITON_INTERPRET") == "1"

    def load(self, name: str) -> ModuleType:
        """The module `<name>.py` of any room; on CPU a private copy bound to the interpreter."""
        module = importlib.import_module(module_of(name))
        return module if self.device.type == "cuda" else interpreted(module)


@cache
def interpreted(module: ModuleType) -> ModuleType:
    """A copy whose kernels are interpreted.

    Triton decides at decoration whether a kernel is, and other tests may have loaded the module
    before. Modules whose jitted functions it calls are copied first.
    """
    with pytest.MonkeyPatch.context() as patch:
        for each in dict.fromkeys([*called_by(module), module]):
            copy = importlib.util.module_from_spec(
                importlib.util.spec_from_file_location(
                    f"{each.__package__}.interpreted_{each.__name__.split('.')[-1]}", each.__file__
                )
            )
            patch.setitem(sys.modules, copy.__name__, copy)  # a dataclass looks itself up there
            copy.__spec__.loader.exec_module(copy)
            patch.setitem(sys.modules, each.__name__, copy)
    return copy


def called_by(module: ModuleType) -> Iterator[ModuleType]:
    """Modules of ours that have jitted functions which `module` imports, dependencies first."""
    for value in vars(module).values():
        home = getattr(getattr(value, "fn", None), "__module__", "")
        if home.startswith(PACKAGE) and home != module.__name__:
            yield from called_by(importlib.import_module(home))
            yield importlib.import_module(home)


@pytest.fixture(scope="session")
def interpreter() -> ModuleType:
    """Triton's interpreter, switched on for this process as an engine on a CPU does."""
    found = pytest.importorskip("triton.runtime.interpreter")
    triton_interpreter.enable()
    teach(found)
    return found


@pytest.fixture(
    params=[
        # Interpreters of some Triton releases do not know numpy's later ones, and a GPU's users
        # choose neither: there the compiled kernels are what counts.
        pytest.param(
            "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled on the GPU")
        ),
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
    ids=["interpreter", "cuda"],
)
def kernels(request) -> Kernels:
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    return Kernels(request.param)


class Loops:
    """Gives a kernel's compiled loops for CPUs by the names of the launchers."""

    device = torch.device("cpu")

    def load(self, name: str) -> SimpleNamespace:
        found = vars(importlib.import_module(module_of(f"{name}_numba"))).items()
        return SimpleNamespace(
            **{k.replace("_numba", "_triton"): loop for k, loop in found if k.endswith("_numba")}
        )


@pytest.fixture(params=["kernel", "loop"])
def forms(request, kernels, monkeypatch) -> Kernels | Loops:
    """A kernel, and the loop that takes the same arguments; all else on the CPU is torch."""
    available = optional_numba.AVAILABLE
    monkeypatch.setattr(optional_numba, "AVAILABLE", False)
    if request.param == "kernel":
        return kernels
    if not available:
        pytest.skip("Numba is not installed")
    return Loops()
