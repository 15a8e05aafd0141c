"""Weight updates of a drafter that serves (SpecBlock paper, §3.4, A.3).

The paper copies a trained drafter into the one that serves between two steps: all of it, or the LM
head and the rank head alone. What serves is folded, shortened or packed (`post_load.py`), and CUDA
graphs know its tensors by their addresses. So new weights are made ready as a checkpoint's are, in
a drafter of their own, whose tensors are then copied onto those in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.checkpoint_files import listed
from vllm_specblock.drafters.common.linear import Fp8Linear, Int8Linear
from vllm_specblock.drafters.common.post_load import Quantization, process_after_loading
from vllm_specblock.drafters.specblock.config import DrafterConfig
from vllm_specblock.drafters.specblock.model import SpecBlockModel

HEADS = ("lm_head", "rank_head")
"""What can be refreshed alone: keys and values of earlier tokens do not depend on it."""


class RefreshError(ValueError):
    """Weights that a serving drafter cannot take; the message is one sentence."""


class Preparation:
    """How new weights are made ready for a serving drafter: as loading makes a checkpoint's.

    Args:
        drafter: as `post_load.process_after_loading` leaves it.
        device: on which it is done; None: on the drafter's, bit for bit as loading does it.

    Raises:
        RefreshError: the drafter was not made ready to serve.
    """

    @torch.inference_mode()
    def __init__(self, drafter: SpecBlockModel, device: torch.device | None = None) -> None:
        if drafter.input_layer.folded is None:
            raise RefreshError("Only a drafter that was made ready to serve can be refreshed.")
        weight = drafter.norm.weight
        self.config, self.dtype, self.serves = drafter.config, weight.dtype, weight.device
        self.device = weight.device if device is None else device
        kinds = {type(module) for module in drafter.modules()}
        self.quantization: Quantization | None = (
            "fp8" if Fp8Linear in kinds else "int8" if Int8Linear in kinds else None
        )
        self._mapping = {name: getattr(drafter, name).to(self.device) for name in ("d2t", "t2d")}

    @torch.inference_mode()
    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New values of a serving drafter's tensors, by the names that `held` gives them.

        Args:
            tensors: by a checkpoint's names and in its shapes (`lm_head.weight` [Vd, H],
                `input_layer.fuse.weight` [H, 3H], …), of any floating dtype, on any device: all
                weights, or those of the LM head and the rank head. The vocabulary mapping is no
                weight, and stays.

        Raises:
            RefreshError: a name is missing or left over, a tensor has another shape, or a number is
                NaN or infinite in the dtype that serves.
        """
        fresh = _blank(self.config, tensors)
        whole = isinstance(fresh, SpecBlockModel)
        # Cast first: a number may be finite in the dtype it comes in alone.
        fresh = fresh.to(self.dtype).to_empty(device=self.device)
        fresh.load_state_dict({**tensors, **(self._mapping if whole else {})})
        for name, weight in fresh.named_parameters():
            _check_finite(f"The new {name}", weight)
        process_after_loading(fresh, self.quantization, self.serves)
        if isinstance(fresh, SpecBlockModel):
            folded = fresh.input_layer.folded
            assert folded is not None  # by `process_after_loading`
            _check_finite("What input_layer.fuse makes of the new queries", folded)
        return dict(held(fresh))


class Staged:
    """New weights for a serving drafter, checked and made ready beside it, not in use yet.

    Making them ready waits for the device and needs the drafter's memory once more; `write` does
    neither.

    Args:
        drafter: see `Preparation`.
        tensors: see `Preparation.prepare`.

    Raises:
        RefreshError: the weights cannot serve.
    """

    def __init__(self, drafter: SpecBlockModel, tensors: Mapping[str, Tensor]) -> None:
        new, served = Preparation(drafter).prepare(tensors), dict(held(drafter))
        self._served, self._new = [served[name] for name in new], list(new.values())

    @torch.inference_mode()
    def write(self) -> None:
        """Copy them onto those in use, at the addresses of before: what was captured reads them.

        To be called between two steps, on the stream on which they run; any number of times. Keys
        and values in the cache stay those of the old weights.
        """
        torch._foreach_copy_(self._served, self._new)


def refresh(drafter: SpecBlockModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a serving drafter other weights, in place, between two steps: all of them or none.

    Args:
        drafter, tensors: see `Staged`.

    Raises:
        RefreshError: as `Staged`; nothing has been written.
    """
    Staged(drafter, tensors).write()


def _blank(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A drafter without values, or its heads alone, for weights of these names and shapes."""
    with torch.device("meta"):
        fresh: nn.Module = SpecBlockModel(config)
    heads = nn.ModuleDict({name: getattr(fresh, name) for name in HEADS})
    known = dict(fresh.named_parameters())
    if extra := sorted(tensors.keys() - known.keys()):
        raise RefreshError(f"The new weights hold {listed(extra)}, which the drafter has not.")
    if tensors.keys() <= dict(heads.named_parameters()).keys():
        fresh = heads
    wanted = {name: weight.shape for name, weight in fresh.named_parameters()}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise RefreshError(
            f"The new weights lack {listed(missing)}: they must be all of a drafter's, or all of "
            f"its {' and '.join(HEADS)}."
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
    """Every tensor of a module by its name: parameters, buffers, and what is an attribute only."""
    for prefix, part in module.named_modules():
        own = part._parameters | part._buffers | vars(part)
        for name, value in own.items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}", value
