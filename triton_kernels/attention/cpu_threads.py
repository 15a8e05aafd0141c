"""Compiled loops on torch's OpenMP threads.

numba's own threads would compete with torch's for the cores, since both spin while they wait. The
GNU and Intel libraries both export the function behind `#pragma omp parallel`. Without it, the
caller's thread runs the loop alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from numba import cfunc, njit, types

from .cpu_vectors import view_of

_LIBRARY = ctypes.CDLL(None)  # torch has loaded the library
_parallel = getattr(_LIBRARY, "GOMP_parallel", None)
if _parallel is not None:
    _parallel.restype = None
    _parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    _number = _LIBRARY.omp_get_thread_num
    _number.restype, _number.argtypes = ctypes.c_int, []
    _team = _LIBRARY.omp_get_num_threads
    _team.restype, _team.argtypes = ctypes.c_int, []
else:
    _number, _team = njit(lambda: 0), njit(lambda: 1)


def team_size() -> int:
    """Threads at most."""
    return torch.get_num_threads() if _parallel is not None else 1


def on_threads(part: Callable[..., Any]) -> Callable[[int, int], None]:
    """Make a function that runs on a team of threads.

    Args:
        part: compiled f(arguments, thread, threads), called once by each of them; arguments is the
            address of int64 numbers.

    Returns:
        f(arguments, threads): runs `part` on up to this many threads, and waits for all.
    """

    @cfunc(types.void(types.int64))
    def body(arguments):
        part(arguments, _number(), _team())

    address, alone = body.address, body.ctypes

    def run(arguments: int, threads: int) -> None:
        if _parallel is not None and threads > 1:
            _parallel(address, arguments, threads, 0)
        else:
            alone(arguments)

    return run


integers = view_of(types.int64)
doubles = view_of(types.float64)
