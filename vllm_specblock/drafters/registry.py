"""Registry of drafters.

A kind is registered by its options, a pydantic model that loads in every process. Its drafter and
its checkpoints are imported only where a model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from vllm_specblock.options import Options

if TYPE_CHECKING:
    from vllm_specblock.drafters.interface import Drafter


class DrafterOptions(Options):
    """Keys of one kind of drafter."""

    @classmethod
    def defaults_for(cls, num_nodes: int) -> dict[str, Any]:
        """Return the defaults that depend on the number of nodes."""
        return {}


class WeightedOptions(DrafterOptions):
    """Keys of every drafter with weights."""

    calibrate_drafts: bool = True
    """Correct the drafter's probabilities by what the target accepts, and grow trees by the
    corrected ones. Off: by the drafter's own, as in the papers."""

    quantization: Literal["fp8"] | None = None
    """Keep the drafter's weights in 8 bits (float8 e4m3), which halves the bytes read per draft.
    Drafts may differ, outputs do not. For GPUs."""


@dataclass(frozen=True)
class DrafterKind:
    """One kind of drafter."""

    options: type[DrafterOptions]  # its keys of `speculative_config`
    drafter: str  # "module:class" of the `Drafter`, which `engine/draft_models.py` makes
    # "module" or "module:object" with `read_config`, `check_tensors`, `load`; None: no weights.
    checkpoint: str | None = None
    reads_text: bool = False  # it reads the requests' tokens on the device
    adapts: bool = False  # it can learn while it serves; `adapt/` parses its key "adapt"
    # Its cache row of a token depends on the next token, so a request must recompute the last
    # cached block of its prefix.
    needs_block_drop: bool = True

    def load_class(self) -> Callable[..., Drafter]:
        return resolve_name(self.drafter)

    def load_checkpoint_module(self) -> Any:
        assert self.checkpoint is not None
        return resolve_name(self.checkpoint)


DRAFTERS: dict[str, DrafterKind] = {}
"""Kinds by the name that `speculative_config` gives them; `drafters/__init__.py` fills it."""

_Options = TypeVar("_Options", bound=DrafterOptions)


def register_drafter(
    name: str, drafter: str, checkpoint: str | None = None, **traits: bool
) -> Callable[[type[_Options]], type[_Options]]:
    """Decorate the options of a new kind; traits: see `DrafterKind`."""

    def register(options: type[_Options]) -> type[_Options]:
        if name in DRAFTERS:
            raise ValueError(f"There is a drafter of kind {name!r} already: choose another name.")
        DRAFTERS[name] = DrafterKind(options, drafter, checkpoint, **traits)
        return options

    return register


def drafter_kind(name: str) -> DrafterKind:
    """Return a kind by its name; raises ValueError if there is none."""
    if name not in DRAFTERS:
        raise ValueError(
            f"There is no drafter of kind {name!r}: choose one of {', '.join(DRAFTERS)}."
        )
    return DRAFTERS[name]
