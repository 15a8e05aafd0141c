"""What a drafter is judged by: τ of its trees, α of its chain, and its rank head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_specblock.config import DEFAULT_NODES, SpecBlockConfig
from vllm_specblock.draft.expand import Shape
from vllm_specblock.draft.model import SpecBlockDrafter
from vllm_specblock.draft.sharpness import Sharpness
from vllm_specblock.train.judge.chain import ChainFigures, chain_along
from vllm_specblock.train.judge.drafting import (
    SpecBlockDraft,
    chain_shape,
    serving_shape,
    uniform_shape,
)
from vllm_specblock.train.judge.replay import Replay, check_steps, replay
from vllm_specblock.train.learner import Script
from vllm_specblock.train.teacher.answers import continue_prompts
from vllm_specblock.train.teacher.features import OnlineTeacher, Teacher
from vllm_specblock.train.text.batch import Batch


@dataclass(frozen=True)
class Reach:
    """One shape of tree. tau: mean tokens committed per step; error: its standard error over
    the steps, as if they were independent; steps; nodes: mean nodes of a tree; sharpness: β in
    the end, 1 if it was not to be learned."""

    tau: float
    error: float
    steps: int
    nodes: float
    sharpness: float = 1.0

    @classmethod
    def of(cls, whole: Replay, sharpness: float = 1.0) -> Reach:
        """Figures of at least one step."""
        accepted = torch.tensor(whole.accepted, dtype=torch.float64)
        steps = len(accepted)
        spread = float(accepted.std()) if steps > 1 else 0.0
        return cls(whole.tau, spread / steps**0.5, steps, sum(whole.nodes) / steps, sharpness)


@dataclass(frozen=True)
class Figures:
    """A drafter on texts of one temperature.

    Attributes:
        texts, new_tokens: how many, and the tokens after their prompts in all.
        trees: by the name of the shape.
        chain: along the chain of `blocks` blocks.
    """

    texts: int
    new_tokens: int
    trees: dict[str, Reach]
    chain: ChainFigures

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def shapes_of(
    drafter: SpecBlockDrafter,
    options: SpecBlockConfig | None = None,
    budgets: Sequence[int] = (DEFAULT_NODES,),
    uniform: bool = False,
) -> dict[str, Shape]:
    """Chains of 1 … M blocks, the tree of serving at each budget, and if wanted the uniform
    tree of the same budget."""
    options = options or SpecBlockConfig()
    shapes = {
        f"chain of {blocks} {'block' if blocks == 1 else 'blocks'}": chain_shape(drafter, blocks)
        for blocks in range(1, options.num_blocks + 1)
    }
    for nodes in budgets:
        shape = serving_shape(drafter, options, nodes)
        shapes[f"tree of {nodes}"] = shape
        if uniform:
            shapes[f"uniform tree of {nodes}"] = uniform_shape(shape)
    return shapes


def evaluate(
    drafter: SpecBlockDrafter,
    scripts: Iterable[Script],
    shapes: dict[str, Shape],
    blocks: int,
    temperature: float | None = None,
) -> Figures:
    """All figures over `scripts`, each of which is read once.

    Args:
        drafter: in the dtype of the arithmetic.
        shapes: of the trees, by name. All take steps where the deepest of them does.
        blocks: M of the chain that α is measured along.
        temperature: at which the target wrote the texts; trees are then grown as serving grows
            them, with a sharpness for each shape that is learned from text to text. None: by the
            drafter's own probabilities.

    Raises:
        TrainError: no text is long enough for a step.
    """
    depth = max(shape.max_depth for shape in shapes.values())
    replays: dict[str, list[Replay]] = {name: [] for name in shapes}
    device = drafter.lm_head.weight.device
    learned = dict.fromkeys(shapes)
    if temperature is not None:
        learned = {name: Sharpness(device, num_slots=1) for name in shapes}
    heat = temperature or 0.0
    chains, new_tokens = [], 0
    for script in scripts:
        for name, shape in shapes.items():
            draft = SpecBlockDraft(drafter, script, shape, learned[name], heat)
            replays[name].append(replay(draft, script, depth))
        if len(script.tokens) > script.prompt + 1:  # else nothing follows the first root
            chains.append(chain_along(drafter, script, blocks))
        new_tokens += len(script.tokens) - script.prompt
    whole = {name: Replay.join(parts) for name, parts in replays.items()}
    for steps in whole.values():
        check_steps(steps, depth)
    return Figures(
        len(replays[next(iter(shapes))]),
        new_tokens,
        {name: Reach.of(steps, _beta(learned[name], heat)) for name, steps in whole.items()},
        ChainFigures.of(chains, drafter.config.block_size),
    )


def _beta(sharpness: Sharpness | None, temperature: float) -> float:
    if sharpness is None:
        return 1.0
    return float(sharpness.of(torch.tensor([temperature], device=sharpness.log.device)))


def scripts_of(
    teacher: Teacher, texts: Sequence[Tensor], prompts: Sequence[int], device: torch.device
) -> Iterator[Script]:
    """Scripts from one target forward per text, as they are asked for.

    Args:
        teacher: runs the target.
        texts: [T_i] int64 each, prompts with the target's own continuations.
        prompts: tokens of each prompt.
        device: the target's.
    """
    for text, prompt in zip(texts, prompts):
        text = text.to(device)
        teaching = teacher.teach(Batch.of(text[None]))
        yield Script(text, prompt, teaching.hidden[0], teaching.last[0], teacher.embed)


def scripts_from(
    target: torch.nn.Module,
    prompts: Sequence[Tensor],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    layer_ids: tuple[int, int, int],
    batch: int = 64,
) -> Iterator[Script]:
    """The target's own continuations of `prompts` as scripts; see `continue_prompts`.

    The texts are written now, and torch's global generators left as they were; each text's
    features come when it is asked for. Keep them in a list to draft along them several times.
    """
    cuda = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        texts = continue_prompts(
            target,
            list(prompts),
            new_tokens,
            temperature=temperature,
            seed=seed,
            batch=batch,
        )
    return scripts_for(target, layer_ids, texts, [len(prompt) for prompt in prompts])


def scripts_for(
    target: torch.nn.Module,
    layer_ids: tuple[int, ...],
    texts: Sequence[Tensor],
    prompts: Sequence[int],
) -> Iterator[Script]:
    """`scripts_of` for a drafter that reads `layer_ids` of a transformers `target`."""
    nothing = torch.empty(0, dtype=torch.int64, device=target.device)  # no law is asked for
    teacher = OnlineTeacher(target, layer_ids, nothing)
    return scripts_of(teacher, texts, prompts, target.device)
