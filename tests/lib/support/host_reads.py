"""Finds reads of device values on the host, on a machine whose every tensor is in host memory.

On a GPU such a read waits for the device, and so does a number on its way into a tensor's places.
Here nothing waits, so what counts is which line of ours asks: the house marks lines that read host
memory with "# a host", and no other line of the package may read a value. What stands in for
kernels on a CPU may.
"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (f"{ROOT / 'vllm_specblock'}/", f"{ROOT / 'triton_kernels'}/")
_VLLM = importlib.util.find_spec("vllm")
VLLM = tuple(f"{folder}/" for folder in (_VLLM.submodule_search_locations if _VLLM else ()))
STAND_INS = ("_reference.py", "_numba.py")
"""Ends of the files that run in a kernel's place."""
CPU_ONLY = f"{ROOT / 'vllm_specblock' / 'cpu'}/"
EMULATOR = f"{ROOT / 'tests' / 'emulated_gpu'}/"

_METHODS = {
    getattr(torch.Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "cpu", "is_nonzero"),
        *("__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"),
    )
}
_OPS = (
    "_local_scalar_dense item is_nonzero nonzero nonzero_numpy masked_select _unique2 unique_dim "
    "unique_consecutive equal repeat_interleave.Tensor bincount argwhere allclose"
)
_OPS = {f"aten::{name}" for name in _OPS.split()}


class HostRead(AssertionError):
    """A value was read that a GPU would have to be waited for."""


def reads_values(op, args) -> bool:
    """Whether an aten op's result has a shape, or a host value, that depends on tensors' values."""
    name = op._schema.name
    overload = f"{name}.{op._overloadname}"
    if name in _OPS or overload in _OPS:
        return True
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return False


def check(what: str) -> None:
    """Raise HostRead unless the read that is under way is one of host memory.

    The innermost frame of ours, of vLLM or of the emulated GPU decides: only ours are judged.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((*VLLM, CPU_ONLY, EMULATOR)) or file.endswith(STAND_INS):
            return
        if file.startswith(PACKAGES):
            line = linecache.getline(file, frame.f_lineno)
            if "# a host" not in line:
                where = f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
                raise HostRead(f"{where} reads a device value ({what}): {line.strip()}")
            return
        frame = frame.f_back


def puts_a_number(tensor: torch.Tensor, index, value) -> bool:
    """Whether `tensor[index] = value` makes a host tensor of a number and copies it.

    It does where the index has tensors in it, and where a single element is named. Elsewhere a view
    is filled.
    """
    if not isinstance(value, int | float):
        return False
    parts = index if isinstance(index, tuple) else (index,)
    single = len(parts) == tensor.dim() and all(isinstance(part, int) for part in parts)
    return single or any(isinstance(part, torch.Tensor) for part in parts)


class HostReadMethods(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _METHODS:
            check(func.__name__)
        if func is torch.Tensor.__setitem__ and puts_a_number(*args):
            check("a number put at places")
        return func(*args, **(kwargs or {}))


class HostReadOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if reads_values(func, args):
            check(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_reads():
    """A context in which reads of device values by lines of ours raise HostRead."""
    with HostReadMethods(), HostReadOps():
        yield
