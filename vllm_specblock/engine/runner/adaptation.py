"""What the options of adaptation make of an engine: a recorder, and a trainer beside it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from vllm.config import VllmConfig

from vllm_specblock.adapt.link.layout import LinkSizes, shapes_of
from vllm_specblock.adapt.link.memory_link import EngineLink
from vllm_specblock.adapt.options import AdaptConfig
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.slabs import Slabs
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.refresh import RefreshError
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, ResolvedDrafter
from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.engine.metrics.exporter import HELP
from vllm_specblock.engine.runner.recording import Nobody, Recorder

logger = logging.getLogger("vllm.specblock")


class Versions:
    """Gives a drafter the weights that its trainer offers.

    Args:
        drafter: that adapts.
        link: the engine's end.
        trainer: started; it ends with the engine.
    """

    def __init__(self, drafter: Drafter, link: EngineLink, trainer: TrainerProcess) -> None:
        self.drafter, self.link, self.trainer = drafter, link, trainer

    def turn(self) -> None:
        """Between two steps: take a version if one waits, in one call."""
        found = self.link.staged()
        if found is None:
            return
        began = time.perf_counter()
        try:
            self.drafter.refresh(found.tensors)
        except RefreshError:
            self.link.refuse(found)
            return
        seconds = time.perf_counter() - began
        self.link.took(found, seconds)
        logger.info(
            "SpecBlock adaptation: version %d (%s, from %d) swapped in in %.1f ms.",
            found.number, "heads" if found.action is Action.HEADS else "all", found.parent,
            1e3 * seconds,
        )  # fmt: skip

    def counts(self) -> Counts:
        """What the trainer did; what was recorded, the recorder counts itself."""
        named = {f"adapt_{name}": count for name, count in self.link.counts.items()}
        return {(name, 0): count for name, count in named.items() if name in HELP}


def make_recorder(
    config: VllmConfig,
    resolved: ResolvedConfig,
    drafters: Sequence[Drafter],
    parent: torch.Tensor,
    max_depth: int,
) -> Recorder | None:
    """What records the requests of an engine; None where no drafter adapts.

    Args:
        drafters: of the plan, loaded.
        parent: [S, N] int32, of the trees under verification.
        max_depth: D, the deepest path.

    Raises:
        TrainError: the folder for versions cannot be used.
    """
    adapting = resolved.adapting
    if adapting is None or adapting.adapt is None:
        return None
    options, model = adapting.adapt, config.model_config
    low, mid, high = (resolved.layers.index(layer) for layer in adapting.layers)
    slabs = Slabs(len(parent), model.get_hidden_size(), model.dtype)
    versions = None
    if options.policy != "watch":
        drafter = drafters[resolved.drafters.index(adapting)]
        versions = _start_trainer(config, adapting, options, drafter)
    return Recorder(
        slabs,
        (low, mid, high),
        parent,
        max_depth + 1,
        options.requests,
        Nobody() if versions is None else versions.link,
        versions,
    )


def _start_trainer(
    config: VllmConfig, resolved: ResolvedDrafter, options: AdaptConfig, drafter: Drafter
) -> Versions:
    assert isinstance(drafter, SpecBlockDrafter) and resolved.folder is not None
    model = config.model_config
    sizes = LinkSizes(
        shapes_of(drafter.model.config), model.get_hidden_size(), model.dtype, model.dtype.itemsize
    )
    link = EngineLink(sizes)
    wanted = TrainerConfig(
        drafter=resolved.folder,
        target=model.model,
        policy=options.rule if options.policy == "bandit" else options.policy,
        actions=options.largest,
        **({} if options.lr is None else {"lr": options.lr}),  # type: ignore[arg-type]  # of all
        every=options.every,
        memory=options.memory,
        out=options.out,
        device=options.trainer,
    )
    trainer = TrainerProcess(wanted, link)
    trainer.start()
    return Versions(drafter, link, trainer)
