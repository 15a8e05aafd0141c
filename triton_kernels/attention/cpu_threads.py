"""Compiled loops on torch's OpenMP threads.

numba's own threads would compete with torch's for the cores, since both spin while they wait. The
GNU and Intel libraries both export the function behind `#pragma omp parallel`. Without it, the
caller's thread runs the loop alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numba import cfunc, types

_LIBRARY = ctypes.CDLL(None)  # torch has loaded the library
_parallel = getattr(_LIBRARY, "GOMP_parallel", None)
if _parallel is not None:
    _parallel.restype = None
    _parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    _number = _LIBRARY.omp_get_thread_num
    _number.restype, _number.argtypes = ctypes.c_int, []
    _team = _LIBRARY.omp_get_num_threads
    _team.restype, _team.argtypes = ctypes.c_int, []


def team_size() -> int:
    """Threads at most."""
    return torch.get_num_threads() if _parallel is not None else 1


def on_threads(part: Callable[..., Any], arguments: int, threads: int) -> None:
    """Run a function on a team of threads, and wait for all.

    Args:
        part: compiled f(arguments, thread, threads), called once by each of them.
        arguments: address of int64 numbers.
        threads: at most this many, and `team_size()`.
    """
    if _parallel is not None and threads > 1:
        _parallel(_callback(part).address, arguments, threads, 0)
    else:
        part(arguments, 0, 1)


@cache
def _callback(part: Callable[..., Any]) -> Any:
    """`part` as a C function of `arguments`; not in a cache, since it holds addresses."""

    @cfunc(types.void(types.int64))
    def body(arguments):
        part(arguments, _number(), _team())

    return body
