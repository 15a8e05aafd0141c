"""Registry of drafters: what has to be known of a kind before its code is loaded.

A kind is registered by its options, a pydantic model that loads in every process. Its drafter and
its checkpoints are named as text, and imported only where a model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from vllm_specblock.options import Options

if TYPE_CHECKING:
    from vllm_specblock.drafters.interface import Drafter


class DrafterOptions(Options):
    """Keys of one kind of drafter."""

    read_elsewhere: ClassVar[frozenset[str]] = frozenset()
    """Keys of this kind that other code parses."""

    @classmethod
    def defaults_for(cls, num_nodes: int) -> dict[str, Any]:
        """Return the defaults that depend on the number of nodes."""
        return {}


class WeightedOptions(DrafterOptions):
    """Keys of every drafter with weights."""

    calibrate_drafts: bool = True
    """Correct the drafter's probabilities by what the target accepts, and grow trees by the
    corrected ones. Off: by the drafter's own, as in the papers."""

    quantization: Literal["fp8", "int8"] | None = None
    """Keep the drafter's weights in 8 bits, which halves the bytes read per draft. Drafts may
    differ, outputs do not. `fp8` (float8 e4m3) is for GPUs, `int8` for CPUs with AMX."""


@dataclass(frozen=True)
class DrafterKind:
    """One kind of drafter.

    Attributes:
        options: its keys of `speculative_config`.
        drafter: "module:class" of the `Drafter`. It is made of (model, embed, options, nodes,
            longest request, lookahead slots, columns of the layers it reads), see
            `engine/runner/build.py`; without weights of (options, nodes, longest request).
        checkpoint: "module" or "module:object" with `read_config`, `check_tensors` and `load`;
            None: no weights.
        reads_text: it reads the requests' tokens on the device.
        adapts: it can learn while it serves (`adapt/`).
        needs_block_drop: its cache row of a token depends on the next token, so a request must
            recompute the last cached block of its prefix.
    """

    options: type[DrafterOptions]
    drafter: str
    checkpoint: str | None = None
    reads_text: bool = False
    adapts: bool = False
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
    """Decorator of a kind's options, which registers the kind; traits: see `DrafterKind`.

    Raises:
        ValueError: there is another kind of that name.
    """

    def register(options: type[_Options]) -> type[_Options]:
        if name in DRAFTERS:
            raise ValueError(f"There is a drafter of kind {name!r} already: choose another name.")
        DRAFTERS[name] = DrafterKind(options, drafter, checkpoint, **traits)
        return options

    return register


def drafter_kind(name: str) -> DrafterKind:
    """A kind by its name; raises ValueError if there is none."""
    if name not in DRAFTERS:
        raise ValueError(
            f"There is no drafter of kind {name!r}: choose one of {', '.join(DRAFTERS)}."
        )
    return DRAFTERS[name]
