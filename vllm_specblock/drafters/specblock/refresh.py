"""Weight updates of a drafter that serves (SpecBlock paper, §3.4, A.3).

Between two steps, all weights or the LM head and the rank head alone. CUDA graphs hold the
addresses of the served weights, which are folded: new ones are folded beside them, and copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.checkpoint_files import listed
from vllm_specblock.drafters.common.linear import PackedLinear, process_after_loading
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.triton_kernels.layers.fp8_linear import Fp8Linear

HEADS = ("lm_head", "rank_head")
"""Modules that can be updated alone: keys and values of earlier tokens do not depend on them."""


class RefreshError(ValueError):
    """Weights that a serving drafter cannot take; the message is one sentence."""


@torch.inference_mode()
def prepare(
    drafter: SpecBlockModel, tensors: Mapping[str, Tensor], device: torch.device | None = None
) -> nn.Module:
    """Load new weights as a checkpoint's are loaded, beside a serving drafter, for `swap_in`.

    Args:
        drafter: as `process_after_loading` leaves it.
        tensors: by a checkpoint's names and in its shapes, of any floating dtype, on any device:
            all weights, or those of `HEADS`. The vocabulary mapping stays.
        device: where to do it; None: the drafter's.

    Raises:
        RefreshError: the drafter does not serve; a name is missing or left over, a tensor has
            another shape, or a number is NaN or infinite in the dtype that serves.
    """
    if drafter.input_layer.folded is None:
        raise RefreshError("Only a drafter that was made ready to serve can be refreshed.")
    serves = drafter.norm.weight
    fp8 = any(isinstance(module, Fp8Linear) for module in drafter.modules())
    fresh = _blank(drafter, tensors)
    # Cast first: a finite number may overflow in the serving dtype.
    fresh = fresh.to(serves.dtype).to_empty(device=device or serves.device)
    fresh.load_state_dict(tensors, strict=False)  # the mapping is missing
    for name, weight in fresh.named_parameters():
        _check_finite(f"The new {name}", weight)
    process_after_loading(fresh, "fp8" if fp8 else None, serves.device)
    if isinstance(fresh, SpecBlockModel):
        folded = fresh.get_buffer("input_layer.folded")
        _check_finite("What input_layer.fuse makes of the new queries", folded)
        del fresh.d2t, fresh.t2d
    return fresh


@torch.inference_mode()
def swap_in(drafter: SpecBlockModel, fresh: nn.Module) -> None:
    """Copy prepared weights to the served ones' addresses; between two steps, on their stream.

    Packed layers of a CPU are replaced: no graph reads them. The cache keeps its old entries.
    """
    for name, module in fresh.named_modules():
        if isinstance(module, PackedLinear):
            drafter.set_submodule(name, module)
    served, new = dict(held(drafter)), dict(held(fresh))
    torch._foreach_copy_([served[name] for name in new], list(new.values()))


def refresh(drafter: SpecBlockModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a serving drafter other weights in place, all or none; see `prepare`."""
    swap_in(drafter, prepare(drafter, tensors))


def _blank(drafter: SpecBlockModel, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A model without values, or its heads alone, for weights of these names and shapes."""
    with torch.device("meta"):
        fresh: nn.Module = SpecBlockModel(drafter.config)
    heads = nn.ModuleDict({name: getattr(fresh, name) for name in HEADS})
    known = dict(fresh.named_parameters())
    if extra := listed(tensors.keys() - known.keys()):
        raise RefreshError(f"The new weights hold {extra}, which the drafter has not.")
    if tensors.keys() <= dict(heads.named_parameters()).keys():
        fresh = heads
    wanted = {name: weight.shape for name, weight in fresh.named_parameters()}
    if missing := listed(wanted.keys() - tensors.keys()):
        raise RefreshError(
            f"The new weights lack {missing}: they must be all of a drafter's, or all of its "
            f"{' and '.join(HEADS)}."
        )
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise RefreshError(
                f"The new {name} has shape {list(tensors[name].shape)}, but the drafter's has "
                f"{list(shape)}."
            )
    return fresh


def _check_finite(what: str, tensor: Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise RefreshError(f"{what} holds NaN or infinite numbers in {tensor.dtype}.")


def held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a module by its name: parameters and buffers."""
    return chain(module.named_parameters(), module.named_buffers())
