"""How well a drafter does on given text, without serving: τ and α, offline.

The text is the target's own greedy continuation, so following it is what verification at
temperature 0 does. Drafting runs through `DenseCache` exactly as a request would, for one
sequence at a time; nothing here is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_specblock.draft.cache import DenseCache
from vllm_specblock.draft.expand import Expansion, Shape
from vllm_specblock.draft.model import SpecBlockDrafter
from vllm_specblock.train.features import teach
from vllm_specblock.train.objective import Unroll
from vllm_specblock.tree import DraftTree


@dataclass(frozen=True)
class Replay:
    """What one text gave.

    accepted: per step, drafted tokens that were right. The step commits one more, the bonus.
    """

    accepted: list[int]

    @property
    def tau(self) -> float:
        """Mean tokens committed per step (paper's accepted length)."""
        return 1 + sum(self.accepted) / max(1, len(self.accepted))


@torch.no_grad()
def replay(
    drafter: SpecBlockDrafter,
    embed: Callable[[Tensor], Tensor],
    features: Tensor,
    text: Tensor,
    prompt: int,
    shape: Shape,
) -> Replay:
    """Draft along `text` as serving would at temperature 0.

    Args:
        drafter: in the dtype of `features`.
        embed: target ids [n] -> the target's embeddings [n, H].
        features: [T, 3·Ht], the target's hidden states of `text`.
        text: [T] int64, a prompt and the target's greedy continuation.
        prompt: tokens of the prompt; the first step starts from the token after it.
        shape: of the trees; one or two blocks.

    Raises:
        ValueError: three blocks or more. Their starts can lie in different blocks, which
            `DenseCache` has no form for.
    """
    if shape.num_blocks > 2:
        raise ValueError(f"Replay drafts one or two blocks, not {shape.num_blocks}.")
    cache = DenseCache(drafter.config, features.dtype, features.device)
    tokens, accepted = text.tolist(), []
    root = prompt
    # A step close to the end could not be accepted in full and would count as a failure.
    while root + shape.num_blocks * shape.block_size + 1 < len(tokens):
        tree = _draft(drafter, embed, features, text, cache, root, shape)
        accepted.append(_follow(tree, tokens[root + 1 :]))
        root += accepted[-1] + 1
    return Replay(accepted)


def _draft(drafter, embed, features, text, cache, root: int, shape: Shape) -> DraftTree:
    """Append the rows up to the root's, and grow a tree from the newest."""
    row = torch.arange(cache.rows, root, device=text.device)
    newest = torch.tensor([len(row) - 1], device=text.device)
    condition, token = drafter.condition(features[row]), embed(text[row + 1])
    hidden = drafter(condition, token, row + 1, cache.append(newest), newest)  # [1, K, H]
    branching = torch.tensor(shape.branching, device=text.device)
    expansion = Expansion(shape, branching, num_requests=1)
    expansion.first_block(*drafter.candidates(hidden, shape.width))
    if shape.num_blocks == 2:
        starts = expansion.starts(2)
        position = starts.position[0]
        further = position + 1 if drafter.config.block_rope == "path" else 0
        base = torch.full_like(position, root) + further
        later = drafter(
            hidden[0, position], embed(starts.token[0]), base, cache.starts(position)
        )  # [S, K, H]
        expansion.next_block(starts, 2, *drafter.candidates(later[None], shape.width))
    return expansion.finish()


def _follow(tree: DraftTree, wanted: list[int]) -> int:
    """How many of the `wanted` tokens lie on one path from the root of a tree (R = 1)."""
    size = int(tree.size[0])
    child = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(tree.parent[0, :size].tolist(), tree.token[0, :size].tolist()), start=1
        )
    }
    node = depth = 0
    while (node := child.get((node, wanted[depth]))) is not None:
        depth += 1
    return depth


@torch.no_grad()
def acceptance(
    drafter: SpecBlockDrafter,
    target: torch.nn.Module,
    texts: list[Tensor],
    prompts: list[int],
    layer_ids: tuple[int, int, int],
    blocks: int = 2,
) -> list[list[float]]:
    """α of block m and position j (paper, appendix C): [blocks][K].

    The share of drafting positions after each prompt at which the drafter's first choice is the
    text's token, given that everything before it on the chain was right. Block m + 1 starts at
    the end of block m.
    """
    draft_ids = drafter.t2d.nonzero()[:, 0]
    sums = torch.zeros(2, blocks, drafter.config.block_size)
    for text, prompt in zip(texts, prompts):
        tokens = text[None].to(target.device)
        unroll = Unroll(
            drafter,
            target.get_input_embeddings(),
            tokens,
            teach(target, tokens, layer_ids, draft_ids),
            first_row=torch.tensor([prompt - 1], device=tokens.device),
        )
        cuts = [drafter.config.block_size] * (blocks - 1)
        for m, block in enumerate(unroll.objective(cuts, rank=False).blocks):
            sums[:, m] += torch.stack([block.hit.sum(0), block.on_path.sum(0)]).cpu()
    hit, seen = sums
    return (hit / seen.clamp(min=1)).tolist()
