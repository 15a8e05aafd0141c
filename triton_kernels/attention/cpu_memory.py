"""Memory that torch owns, for numba. Importing this module needs numba."""

from __future__ import annotations

from numba import carray, njit, types
from numba.extending import intrinsic


def view_of(dtype):
    """→ f(address, count): memory as a numpy array; inside numba only."""
    element = types.CPointer(dtype)

    @intrinsic
    def pointer(context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(element))

        return element(types.int64), generate

    @njit(nogil=True)
    def view(address, count):
        return carray(pointer(address), (count,))

    return view
