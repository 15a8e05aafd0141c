"""Arguments of kernel launches as a compiler sees them, in JSON."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection
from typing import Any

import torch


def launch_record(
    kernel: Callable, given: dict[str, Any], constants: Collection[str], options: dict[str, int]
) -> str:
    """Return a launch as a line of JSON; `given` are its arguments by name."""
    plain = {key: as_compiled(value, key in constants) for key, value in given.items()}
    name = f"{kernel.__module__}.{kernel.__name__}"
    return json.dumps({"kernel": name, "arguments": plain, "options": options})


def as_compiled(value: Any, constant: bool) -> Any:
    """Return a launch's argument without what a compiler does not specialise for."""
    if isinstance(value, tuple):
        items = [as_compiled(item, constant) for item in value]
        kind = type(value)
        return {"tuple": items, "of": f"{kind.__module__}:{kind.__qualname__}"}
    if isinstance(value, torch.Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "at": value.data_ptr() % 16}
    if constant or value is None or isinstance(value, bool):
        return value if isinstance(value, (int, float, str, type(None))) else {"dtype": str(value)}
    if isinstance(value, float):
        return 0.5
    wide = 1 << 40 if not -(1 << 31) <= value < 1 << 31 else 0
    return wide + (1 if value == 1 else 16 if value % 16 == 0 else 3)


def argument(value: Any) -> Any:
    """Return an argument that a compiler sees as the recorded one; see `as_compiled`."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        dtype = getattr(torch, value["tensor"])
        return torch.empty(64, dtype=dtype)[value["at"] // dtype.itemsize :]
    if "dtype" in value:
        import triton.language as tl

        return getattr(tl, value["dtype"])
    module, name = value["of"].split(":")
    items = [argument(item) for item in value["tuple"]]
    if module == "builtins":
        return tuple(items)
    return getattr(importlib.import_module(module), name)(*items)
