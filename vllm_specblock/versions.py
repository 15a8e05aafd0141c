"""Supported vLLM releases."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VLLM: dict[str, str] = {
    "0.32": "Model Runner V2, on CUDA and on CPU builds",
    "0.33": "Model Runner V2, on CUDA; there is no CPU build of it",
}
"""Minor release of vLLM → where engines of it can draft."""


def installed_version(package: str) -> str | None:
    """Return the version of a distribution; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_supported(release: str) -> bool:
    """Return whether `release` (e.g. ``"0.32.0+cpu"``) is of a supported minor release."""
    return ".".join(release.split("+")[0].split(".")[:2]) in SUPPORTED_VLLM


def supported_releases() -> str:
    """Return the supported releases as text, e.g. "0.32.x, 0.33.x"."""
    return ", ".join(f"{minor}.x" for minor in SUPPORTED_VLLM)


def supported_sentence(release: str) -> str:
    """Return the error message for an unsupported vLLM release."""
    return (
        f"vllm_specblock supports vLLM {supported_releases()}, but {release} is installed: install "
        "versions that work together, or drop method 'specblock' from speculative_config."
    )
