"""Where the kernels run: under Triton's interpreter on any machine, and compiled where CUDA is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

PACKAGE = "vllm_specblock.triton_kernels"


class Kernels:
    """Gives a kernel's module in the form that runs on `device`."""

    def __init__(self, device: str):
        self.device = torch.device(device)

    def load(self, name: str) -> ModuleType:
        """The module `triton_kernels/<name>.py`; on CPU a private copy bound to the interpreter.

        Triton decides at decoration whether a kernel is interpreted. The copy is decorated while
        the switch is on, so that no other test of this process meets interpreted kernels.
        """
        module = importlib.import_module(f"{PACKAGE}.{name}")
        if self.device.type == "cuda":
            return module
        copy = importlib.util.module_from_spec(
            importlib.util.spec_from_file_location(f"{PACKAGE}.interpreted_{name}", module.__file__)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setitem(sys.modules, copy.__name__, copy)  # a dataclass looks itself up there
            copy.__spec__.loader.exec_module(copy)
        return copy


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ),
    ],
    ids=["interpreter", "cuda"],
)
def kernels(request, monkeypatch) -> Kernels:
    if request.param == "cpu":
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        interpret_library(interpreter, monkeypatch)
        teach_bf16_dot(interpreter, monkeypatch)
    return Kernels(request.param)


def interpret_library(interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own library (`tl.max`, `tl.sum`, …) was decorated with the switch off."""
    from triton.runtime.jit import JITFunction

    for name, function in vars(interpreter.tl).items():
        if isinstance(function, JITFunction):
            interpreted = interpreter.InterpretedFunction(function.fn)
            monkeypatch.setattr(interpreter.tl, name, interpreted)


def teach_bf16_dot(interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as bit patterns, and its dot multiplies these as integers."""
    plain = interpreter.InterpreterBuilder.create_dot
    tl = interpreter.tl

    def widen(builder, operand):
        return builder.cast_impl(operand, tl.float32) if operand.dtype == tl.bfloat16 else operand

    def create_dot(self, a, b, *rest):
        return plain(self, widen(self, a), widen(self, b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
