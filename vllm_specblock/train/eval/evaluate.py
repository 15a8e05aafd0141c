"""Evaluation figures: τ of trees, α of the chain, and the rank head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_specblock.config import DEFAULT_NODES
from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.eval.chain import ChainFigures, chain_along
from vllm_specblock.train.eval.drafting import (
    chain_shape,
    draft_trees,
    serving_shape,
)
from vllm_specblock.train.eval.steps import Replay
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.target.answers import continue_prompts
from vllm_specblock.train.target.features import OnlineTeacher
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TreeFigures:
    """One shape of tree. tau: mean tokens committed per step; error: its standard error over
    independent steps; nodes: mean nodes of a tree; sharpness: β in the end, 1 if not learned."""

    tau: float
    error: float
    steps: int
    nodes: float
    sharpness: float = 1.0

    @classmethod
    def of(cls, whole: Replay, sharpness: float = 1.0) -> TreeFigures:
        """Figures of at least one step."""
        accepted = torch.tensor(whole.accepted, dtype=torch.float64)
        steps = len(accepted)
        spread = float(accepted.std()) if steps > 1 else 0.0
        return cls(whole.tau, spread / steps**0.5, steps, sum(whole.nodes) / steps, sharpness)


@dataclass(frozen=True)
class Figures:
    """A drafter on texts of one temperature: number of texts and of tokens after their prompts,
    figures by the name of the trees' shape, and along the chain of `blocks` blocks."""

    texts: int
    new_tokens: int
    trees: dict[str, TreeFigures]
    chain: ChainFigures

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def shapes_of(
    drafter: SpecBlockModel,
    options: SpecBlockConfig | None = None,
    budgets: Sequence[int] = (DEFAULT_NODES,),
) -> dict[str, TreeShape]:
    """Chains of 1 … M blocks, and the tree of serving at each budget."""
    options = options or SpecBlockConfig()
    shapes = {
        f"chain of {blocks} {'block' if blocks == 1 else 'blocks'}": chain_shape(drafter, blocks)
        for blocks in range(1, options.num_blocks + 1)
    }
    trees = {f"tree of {nodes}": serving_shape(drafter, options, nodes) for nodes in budgets}
    return shapes | trees


def evaluate(
    drafter: SpecBlockModel,
    sequences: Iterable[EvalSequence],
    shapes: dict[str, TreeShape],
    blocks: int,
    temperature: float | None = None,
) -> Figures:
    """All figures over `sequences`, each of which is read once.

    Args:
        shapes: of the trees, by name; all take the steps of the deepest one.
        blocks: M of the chain for α.
        temperature: of the target's texts; each shape then learns β from text to text, as in
            serving. None: trees grow by the drafter's own probabilities.

    Raises:
        TrainError: no text is long enough for a step.
    """
    depth = max(shape.max_depth for shape in shapes.values())
    replays = {name: Replay() for name in shapes}
    device = drafter.lm_head.weight.device
    heat, learned = temperature or 0.0, dict[str, DraftCalibration]()
    if temperature is not None:
        learned = {name: DraftCalibration(device, num_slots=1) for name in shapes}
    chains, texts, new_tokens = [], 0, 0
    for sequence in sequences:
        texts += 1
        for name, shape in shapes.items():
            draft = draft_trees(drafter, sequence, shape, learned.get(name), heat)
            replays[name].follow(draft, sequence, depth)
        if len(sequence.tokens) > sequence.prompt + 1:  # else the text ends at the first root
            chains.append(chain_along(drafter, sequence, blocks))
        new_tokens += len(sequence.tokens) - sequence.prompt
    trees = {}
    for name, whole in replays.items():
        whole.check(depth)
        beta = float(learned[name].of(torch.tensor([heat], device=device))) if learned else 1.0
        trees[name] = TreeFigures.of(whole, beta)
    chain = ChainFigures.of(chains, drafter.config.block_size)
    return Figures(texts, new_tokens, trees, chain)


def sequences_from(
    target: PreTrainedModel,
    prompts: Sequence[Tensor],
    new_tokens: int,
    *,
    layer_ids: tuple[int, ...],
    **sampling: Any,
) -> Iterator[EvalSequence]:
    """The target's own continuations of `prompts` as sequences; sampling: see `continue_prompts`.

    The texts are written now; the features of a text are computed when the iterator reaches it.
    """
    texts = continue_prompts(target, list(prompts), new_tokens, **sampling)
    return sequences_for(target, layer_ids, texts, [len(prompt) for prompt in prompts])


def sequences_for(
    target: PreTrainedModel,
    layer_ids: tuple[int, ...],
    texts: Sequence[Tensor],
    prompts: Sequence[int],
) -> Iterator[EvalSequence]:
    """Yield sequences for a drafter that reads `layer_ids` of a transformers `target`; texts:
    [T_i] int64 each, prompts (of so many tokens) with the target's own continuations."""
    no_ids = torch.empty(0, dtype=torch.int64, device=target.device)  # p* is not needed
    teacher = OnlineTeacher(target, layer_ids, no_ids)
    for text, prompt in zip(texts, prompts):
        yield EvalSequence.of(teacher, Batch.of(text.to(target.device)[None]), prompt)
