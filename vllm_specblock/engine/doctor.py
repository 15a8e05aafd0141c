"""Checks for problems that prevent drafting, in the order in which an engine meets them."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple

from vllm_specblock.engine import compat
from vllm_specblock.versions import (
    installed_version,
    is_supported,
    supported_releases,
    supported_sentence,
)

OURS = "vllm-specblock"


class Finding(NamedTuple):
    """One line of the report; "wrong": an engine would fail, or run without drafts."""

    name: str  # what was examined
    found: str  # its state
    advice: str = ""  # what to do, one line
    verdict: Literal["right", "note", "wrong"] = "right"


wrong = partial(Finding, verdict="wrong")


def examine(target: str | None, given: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield findings; vLLM is imported last, and only if no earlier check failed.

    Args:
        target: a folder or a hub id; None: no engine is configured.
        given: a `speculative_config`; None: n-gram lookup.
    """
    found = [*versions(), plugin(), hooks()]
    if all(each.verdict != "wrong" for each in found):
        found.append(kernels())
    yield from found
    if target is None:
        if given is not None:
            advice = "Give --target to check it with one, or use specblock inspect."
            yield wrong("drafter", "not examined", advice)
    elif all(each.verdict != "wrong" for each in found):
        yield from engine(target, {"kind": "ngram"} if given is None else given)
    else:
        yield wrong("target, drafter", "not examined", "Correct what is wrong above first.")


def versions() -> Iterator[Finding]:
    """Judge vLLM's release, and list the packages that pip holds to the requirements of both."""
    found = {name: installed_version(name) for name in ("torch", "transformers", "triton")}
    listed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Finding("packages", f"Python {platform.python_version()}, {listed}")
    for name, version in found.items():
        if version is None:
            yield wrong(name, "not installed", f"Install {name}.")
    vllm = installed_version("vllm")
    if vllm is None:
        how = "on a CPU tools/setup_env.py shows what that takes."
        yield wrong("vLLM", "not installed", f"Install vLLM {supported_releases()}; {how}")
    elif not is_supported(vllm):
        yield wrong("vLLM", vllm, supported_sentence(vllm))
    else:
        yield Finding("vLLM", vllm)


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
        return Finding("hooks", f"{count} of {count} are in vLLM")
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    advice = "Install vLLM and the plugin anew, in versions that go together."
    return wrong("hooks", f"{len(found)} of {count} are not: {'; '.join(found[:3])}{more}", advice)


def kernels() -> Finding:
    """Find what runs the kernels on this machine."""
    import torch

    if torch.cuda.is_available():
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
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
        return Finding("kernels", slow, advice, "note")
    tiles = "with" if torch.cpu._is_amx_tile_supported() else "without"
    numba = f"Numba {installed_version('numba')}"
    return Finding("kernels", f"{numba} compiles loops for this CPU, {tiles} AMX")


def engine(target: str, given: dict[str, Any]) -> Iterator[Finding]:
    """Build an engine's config, which makes all of its checks, and yield what it read."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        from vllm_specblock.config import METHOD

        if given.get("method", METHOD) != METHOD:
            raise ValueError(f"'method' is {given['method']!r}, but must be {METHOD!r} here.")
        speculative = {"method": METHOD, **given}
        args = EngineArgs(model=target, speculative_config=speculative, disable_log_stats=True)
        config = args.create_engine_config()
    except Exception as error:  # of vLLM, transformers or ours; an installation can be broken
        advice = " ".join(str(error).split()) or type(error).__name__
        yield wrong("target, drafter", f"{target}, {given.get('model', given)}", advice)
        return
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    yield Finding("target", f"{target}: {model.architecture}, {dtype}")
    for number, drafter in enumerate(config.speculative_config.specblock.drafters, 1):
        source = drafter.folder or "the requests' own text"
        layers = ", ".join(map(str, drafter.layers)) or "none"
        found = f"{source}: {drafter.kind}, reads target layers {layers}"
        yield Finding(f"drafter {number}", found)
