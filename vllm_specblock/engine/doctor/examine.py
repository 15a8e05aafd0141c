"""Checks of versions, hooks and kernels, in the order in which an engine needs them."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points, metadata, requires
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_specblock.engine import compat
from vllm_specblock.versions import (
    installed_version,
    is_supported,
    supported_releases,
    supported_sentence,
)

OURS = "vllm-specblock"
COMPILERS = ("gcc", "clang", "cc")
"""C compilers that Triton can use to build kernel launchers."""


@dataclass(frozen=True)
class Finding:
    """One line of the report; "wrong": an engine would fail, or run without drafts."""

    name: str  # what was examined
    found: str  # its state
    verdict: Literal["right", "note", "wrong"] = "right"
    advice: str = ""  # what to do, one line


def wrong(name: str, found: str, advice: str) -> Finding:
    return Finding(name, found, "wrong", advice)


def as_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def examine(target: str | None, given: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield findings; vLLM is imported last, and only if no earlier check failed.

    Args:
        target: a folder or a hub id.
        given: a `speculative_config`; None: no drafter is examined.
    """
    begun = True
    for finding in (*versions(), hooks()):
        yield finding
        begun = begun and (finding.verdict != "wrong" or finding.name == OURS)
    if not begun:
        if target is not None or given is not None:
            yield wrong("target, drafter", "not looked at", "See to what is wrong above first.")
        return
    yield kernels()
    try:
        from vllm_specblock.engine.doctor.pair import pair, runner
    except Exception as error:  # an installation can be broken in any way
        yield wrong("runner", f"vLLM cannot be imported: {as_line(error)}", "Install it anew.")
        return
    yield runner()
    yield from pair(target, given)


def versions() -> Iterator[Finding]:
    """Judge Python, the packages we rely on, and the plugin's entry point."""
    wanted = SpecifierSet(metadata(OURS)["Requires-Python"] or "")
    yield _judged("Python", platform.python_version(), wanted)
    specifiers = {each.name: each.specifier for each in map(Requirement, requires(OURS) or ())}
    for package in ("torch", "transformers"):
        yield _judged(package, installed_version(package), specifiers[package])
    found = installed_version("vllm")
    if found is None:
        how = "on a CPU tools/setup_env.py shows what that takes."
        yield wrong("vLLM", "not installed", f"Install vLLM {supported_releases()}; {how}")
    elif not is_supported(found):
        yield wrong("vLLM", found, supported_sentence(found))
    else:
        yield Finding("vLLM", found)
    yield _judged("triton", installed_version("triton"), SpecifierSet())
    yield plugin()


def _judged(package: str, found: str | None, wanted: SpecifierSet) -> Finding:
    if found is None or not wanted.contains(found, prereleases=True):
        return wrong(package, found or "not installed", f"Install {package}{wanted}.")
    return Finding(package, found)


def plugin() -> Finding:
    """Check that vLLM finds the plugin, and may load it."""
    ours = installed_version(OURS) or "?"
    points = entry_points(group="vllm.general_plugins")
    names = {each.name for each in points if each.value.startswith("vllm_spec")}
    if not names:
        advice = f"Install it again (pip install {OURS}): vLLM finds plugins by their entry points."
        return wrong(OURS, f"{ours}, without its entry point", advice)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not names & set(allowed.split(",")):
        advice = f"Add {min(names)} to VLLM_PLUGINS, or unset it."
        return wrong(OURS, f"{ours}, and VLLM_PLUGINS={allowed!r} leaves it out", advice)
    return Finding(OURS, ours)


def hooks() -> Finding:
    """Check the table of hooks against the installed vLLM."""
    root = compat.installed()
    if root is None:
        return wrong("hooks", "nothing to look at", "Install vLLM.")
    count, found = len(compat.hooks()), list(compat.broken(root))
    if not found:
        return Finding("hooks", f"{count} of {count} are in vLLM as they have to be")
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    advice = "Install vLLM and the plugin anew, in versions that go together."
    return wrong("hooks", f"{len(found)} of {count} are not: {'; '.join(found[:3])}{more}", advice)


def kernels() -> Finding:
    """Find what runs the kernels on this machine."""
    import torch

    if torch.cuda.is_available():
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        compiler = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
        if compiler is None:
            advice = "Triton needs one to launch kernels: install gcc or clang, or name one in CC."
            return wrong("kernels", f"{name}, and no C compiler", advice)
        return Finding("kernels", f"Triton compiles them for sm_{major}{minor} ({name})")
    found = installed_version("vllm")
    if found is not None and "cpu" not in found:
        advice = "Look at nvidia-smi and CUDA_VISIBLE_DEVICES, or install vLLM's CPU build."
        return wrong("kernels", "vLLM's CUDA build, and no GPU answers", advice)
    from vllm_specblock.triton_kernels.optional_numba import AVAILABLE

    if not AVAILABLE:
        slow = "Triton's interpreter: right, and 10 to 100 times slower"
        advice = "Install numba, whose loops replace them on a CPU."
        return Finding("kernels", slow, "note", advice)
    tiles = "with" if torch.cpu._is_amx_tile_supported() else "without"
    return Finding(
        "kernels", f"Numba {installed_version('numba')} compiles loops for this CPU, {tiles} AMX"
    )
