"""Every module of the package loads with the installed vLLM, whichever release that is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import vllm_specblock
from vllm_specblock import triton_kernels

LEFT_OUT = ("vllm_specblock.cpu", "vllm_specblock.__main__")
"""What needs vLLM's CPU build, and a command."""


def modules() -> list[str]:
    found = []
    for package in (vllm_specblock, triton_kernels):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found.append(".".join([package.__name__, *parts]).removesuffix(".__init__"))
    return sorted(name for name in found if not name.startswith(LEFT_OUT))


@pytest.mark.parametrize("name", modules())
def test_it_loads(name):
    import_module(name)
