"""Versions: Python and the packages that are leaned on, and whether vLLM loads the plugin."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_specblock.engine.doctor.finding import Finding, wrong
from vllm_specblock.versions import is_supported, supported_releases, supported_sentence

OURS = "vllm-specblock"
PLUGINS = "vllm.general_plugins"


def installed(package: str) -> str | None:
    """A distribution's version; None: there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> Iterator[Finding]:
    """One finding each."""
    wanted = SpecifierSet(metadata(OURS)["Requires-Python"] or "")
    yield _judged("Python", platform.python_version(), wanted)
    specifiers = {each.name: each.specifier for each in map(Requirement, requires(OURS) or ())}
    for package in ("torch", "transformers"):
        yield _judged(package, installed(package), specifiers[package])
    yield vllm()
    triton = installed("triton")
    if triton is None:
        yield wrong("triton", "not installed", "vLLM's Model Runner V2 needs it: install triton.")
    else:
        yield Finding("triton", triton)
    yield plugin()


def vllm() -> Finding:
    """The release that is installed."""
    found = installed("vllm")
    if found is None:
        advice = (
            f"Install vLLM {supported_releases()}; on a CPU tools/setup_env.py shows what that "
            "takes."
        )
        return wrong("vLLM", "not installed", advice)
    if not is_supported(found):
        return wrong("vLLM", found, supported_sentence(found))
    return Finding("vLLM", found)


def plugin() -> Finding:
    """Whether vLLM finds the plugin, and may load it."""
    ours = installed(OURS) or "?"
    names = [
        each.name for each in entry_points(group=PLUGINS) if each.value.startswith("vllm_spec")
    ]
    if not names:
        advice = f"Install it again (pip install {OURS}): vLLM finds plugins by their entry points."
        return wrong(OURS, f"{ours}, without its entry point", advice)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not set(names) & set(allowed.split(",")):
        advice = f"Add {names[0]} to VLLM_PLUGINS, or unset it."
        return wrong(OURS, f"{ours}, and VLLM_PLUGINS={allowed!r} leaves it out", advice)
    return Finding(OURS, ours)


def _judged(package: str, found: str | None, wanted: SpecifierSet) -> Finding:
    if found is None:
        return wrong(package, "not installed", f"Install {package}{wanted}.")
    if not wanted.contains(found, prereleases=True):
        return wrong(package, found, f"Install {package}{wanted}.")
    return Finding(package, found)
