"""Triton launches on the emulated GPU: interpreted, in stream order and at each replay."""

from __future__ import annotations

import ast
import atexit
import collections
import functools
import inspect
import itertools
import os
import random
import runpy
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import _emulated_gpu
import numpy as np
import torch

from emulated_gpu.launch_records import launch_record

SHUFFLE = os.environ.get("EMU_SHUFFLE") == "1"
HOST_FORMS = os.environ.get("EMU_HOST_FORMS") == "1"
BOUNDS = os.environ.get("EMU_BOUNDS") == "1"
TRACE = os.environ.keys() & {"EMU_TRACE", "EMU_TRACE_ALL"}
TAKES_POINTERS = (
    "_gather_block_tables_kernel",
    "_compute_slot_mappings_kernel",
    "_move_path_kernel",
    # Of adapters, and of targets with recurrent layers.
    "_lora_shrink_kernel",
    "_lora_expand_kernel",
    "_apply_write_kernel",
    "_zero_kv_blocks_kernel",
    "batch_memcpy_kernel",
)
"""Kernels whose arguments contain pointers: they may access any memory of the device."""

seconds: collections.Counter[str] = collections.Counter()
order = random.Random(0)
running: list[tuple[str, list[tuple[int, int]]]] = []
"""The kernel that runs, and first byte and end of each storage in its arguments."""


def install() -> None:
    from triton.runtime import autotuner, interpreter

    interpreter.GridExecutor.__call__ = launch
    interpreter.ASTTransformer.visit_For = rewrite_loop
    # The first config is as good as any here.
    autotuner.Autotuner._bench = lambda self, *args, config, **meta: [0.0]
    if TRACE:
        atexit.register(print_times)


def rewrite_loop(self, node: ast.For) -> ast.AST:
    """Convert a loop variable that the kernel casts to a tensor: the interpreter has an `int`."""
    name = ast.unparse(node.target)
    if f"{name}.to(" in ast.unparse(node):
        node.body[:0] = ast.parse(f"{name} = {name}").body  # assignments convert
    return self.generic_visit(node)


@functools.cache  # at the first launch: the language is only half imported before it
def patch_interpreter(interpreter: ModuleType) -> None:
    """Add what the interpreter lacks, and replace what takes seconds in it."""
    tl = interpreter.tl
    # By its path: `benchmarks/` is not importable in an engine.
    taught = runpy.run_path(str(Path(__file__).parents[4] / "benchmarks/lib/interpreter.py"))
    taught["teach"](interpreter)
    # Triton 3.7's give NaN for one NaN; a GPU, and 3.8's, the other operand.
    builder = interpreter.InterpreterBuilder
    builder.create_minnumf = functools.partialmethod(builder.binary_op, op=np.fmin)
    builder.create_maxnumf = functools.partialmethod(builder.binary_op, op=np.fmax)
    sort_by_numpy(interpreter)
    if BOUNDS:
        check_accesses(interpreter)

    def globaltimer(_semantic=None, **_):
        return interpreter.interpreter_semantic.to_tensor(time.time_ns())

    tl.extra.cuda.globaltimer = globaltimer
    # Programs of one stream never overlap.
    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda **_: None

    # No kernel is compiled in this process, so the language keeps the interpreter's functions:
    # replacing them at each launch takes longer than most launches.
    patch_language = interpreter._patch_lang
    patched: set[int] = set()

    def patch_once(fn: Callable) -> SimpleNamespace:
        names = fn.__globals__
        if id(names) not in patched:
            modules = {id(value) for value in names.values() if value in (tl, tl.core)}
            if not modules <= patched:
                patch_language(fn)
            patched.update(modules, {id(names)})
            for name, value in list(names.items()):
                if tl.core.is_builtin(value):  # as in `exp = tl.exp`
                    names[name] = getattr(tl, value.__name__, value)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


def sort_by_numpy(interpreter: ModuleType) -> None:
    """Replace networks of exchanges: most of an engine's time."""
    tl = interpreter.tl

    def sort(x, dim=None, descending=False):
        assert x.dtype.is_int() and dim is None and not descending
        handle = interpreter.TensorHandle(np.sort(x.handle.data, axis=-1), x.handle.dtype)
        return tl.core.tensor(handle, x.type)

    def topk(x, k, dim=None):
        assert x.dtype.is_int() and dim is None
        data = np.flip(np.sort(x.handle.data, axis=-1), -1)[..., : int(k)]
        handle = interpreter.TensorHandle(np.ascontiguousarray(data), x.handle.dtype)
        return tl.core.tensor(handle, tl.block_type(x.dtype, list(data.shape)))

    tl.sort, tl.topk = sort, topk


def check_accesses(interpreter: ModuleType) -> None:
    """Check the addresses of all loads and stores."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(self, pointers, mask, *rest):
        itemsize = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        check(pointers.data, mask.data, itemsize)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers.data, mask.data, np.dtype(value.data.dtype).itemsize)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store


def check(pointers: np.ndarray, mask: np.ndarray, itemsize: int) -> None:
    """Raise if an address is in no argument of the kernel that runs."""
    name, ranges = running[-1]
    # A mask may be of integers, which numpy would take for indices.
    masked = np.broadcast_to(mask, pointers.shape).astype(bool)
    addresses = pointers[masked].astype(np.uint64)
    inside = np.zeros(addresses.shape, dtype=bool)
    for begin, end in ranges:
        inside |= (addresses >= begin) & (addresses <= end - itemsize)
    outside = addresses[~inside]
    if name.endswith(TAKES_POINTERS):
        pages = np.unique(outside // 512 * 512)  # torch allocates whole ones
        outside = [each for each in pages.tolist() if not _emulated_gpu.holds(each)]
    if len(outside):
        raise IndexError(f"{len(outside)} of {addresses.size} accesses are outside its arguments")


def print_times() -> None:
    for name, spent in seconds.most_common(25):
        print(f"[emu] {spent:8.2f} s in {name}", file=sys.stderr)


def on_host(arg: Any) -> Any:
    """Return the argument as the interpreter reads it: a host tensor on the same memory."""
    if isinstance(arg, tuple):
        values = [on_host(item) for item in arg]
        return type(arg)(*values) if hasattr(arg, "_fields") else tuple(values)
    if isinstance(arg, torch.Tensor):
        if not arg.is_cuda and not arg.is_pinned():
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        alias = _emulated_gpu.alias(arg.detach())
        if BOUNDS and arg.numel():
            storage = arg.untyped_storage()
            alias.storage_range = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        return alias
    if hasattr(arg, "data_ptr"):  # a reinterpreted tensor
        from triton.runtime.interpreter import _rewrap_tensor, _unwrap_tensor

        return _rewrap_tensor(on_host(_unwrap_tensor(arg)), original_tensor=arg)
    return arg


def tensors(arg: Any) -> Iterable[Any]:
    """Yield all tensors in an argument."""
    if isinstance(arg, (list, tuple)):
        for item in arg:
            yield from tensors(item)
    arg = getattr(arg, "base", arg)  # of a reinterpreted tensor
    if isinstance(arg, torch.Tensor):
        yield arg


RECORD = os.environ.get("EMU_RECORD_LAUNCHES")
recorded: set[str] = set()


def record(self, given: dict[str, Any], options: dict[str, Any]) -> None:
    """Add a launch to the file that `EMU_RECORD_LAUNCHES` names, as far as a compiler sees it."""
    line = launch_record(self.fn, given, self.constexprs, options)
    if line not in recorded:
        recorded.add(line)
        with open(RECORD, "a") as file:
            file.write(line + "\n")


@functools.cache
def parameters(fn: Callable) -> tuple[list[str], dict[str, Any]]:
    """Names of a kernel's arguments, and defaults."""
    known = inspect.signature(fn).parameters
    empty = inspect.Parameter.empty
    return list(known), {name: x.default for name, x in known.items() if x.default is not empty}


def launch(self, *args: Any, **kwargs: Any) -> None:
    """`GridExecutor.__call__`: run the kernel, or add it to the current stream."""
    from triton.runtime import interpreter

    patch_interpreter(interpreter)
    known, defaults = parameters(self.fn)
    args = tuple(on_host(arg) for arg in args)
    options = {name: kwargs[name] for name in ("num_warps", "num_stages") if name in kwargs}
    kwargs = {name: on_host(arg) for name, arg in kwargs.items() if name in known}
    for hook in self.pre_run_hooks:
        hook(*args, **kwargs)
    given = {**defaults, **dict(zip(known, args)), **kwargs}
    grid = self.grid(given) if callable(self.grid) else self.grid
    # It may replace arguments, as that of vLLM's causal convolution does.
    given |= {k: on_host(arg) for k, arg in given.items() if getattr(arg, "is_cuda", False)}
    grid = tuple(map(int, grid if isinstance(grid, (tuple, list)) else (grid,)))
    grid += (1,) * (3 - len(grid))
    if grid[1] > 65535 or grid[2] > 65535:
        raise RuntimeError("Triton Error [CUDA]: invalid argument")
    if 0 in grid:
        return
    name = f"{self.fn.__module__}.{self.fn.__name__}"
    if RECORD and self.fn.__module__.startswith("vllm_specblock."):
        record(self, given, options)
    ranges = [x.storage_range for x in tensors([*given.values()]) if hasattr(x, "storage_range")]

    def interpret() -> None:
        running.append((name, ranges))
        began = time.perf_counter()
        scope = interpreter._patch_lang(self.fn)
        try:
            values = {
                key: arg if key in self.constexprs else interpreter._implicit_cvt(arg)
                for key, arg in given.items()
            }
            interpreter.interpreter_builder.set_grid_dim(*grid)
            programs = list(itertools.product(*map(range, grid)))
            if SHUFFLE:
                order.shuffle(programs)
            for index in programs:
                interpreter.interpreter_builder.set_grid_idx(*index)
                self.fn(**values)
        finally:
            scope.restore()
            running.pop()
            seconds[name] += time.perf_counter() - began

    form = None
    if HOST_FORMS:
        from emulated_gpu import host_forms  # imports kernels, and so Triton as a whole

        form = host_forms.known(self.fn)

    def run() -> None:
        if form is None:
            return interpret()
        began = time.perf_counter()
        host_forms.run(form, given, grid, interpret)
        seconds[f"{name} and its host form"] += time.perf_counter() - began

    if _emulated_gpu.lazy() or _emulated_gpu.capturing():
        _emulated_gpu.enqueue(run, name)
    else:
        run()
