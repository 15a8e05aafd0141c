"""A compiled loop on the threads that torch computes on.

numba's own threads would be a second set, and two sets that spin while they wait take the cores
from each other. torch's are OpenMP's: a team is asked for by the function to which compilers turn
`#pragma omp parallel`, which GNU's and Intel's library both have. Where there is none, the caller's
thread does it all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from numba import cfunc, njit, types

from .cpu_ir import view_of

_LIBRARY = ctypes.CDLL(None)  # torch, imported before, has brought the library along
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
        f(arguments, threads): gives `part` to so many threads at most, and waits for all.
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
