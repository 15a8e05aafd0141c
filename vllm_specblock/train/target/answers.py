"""Target continuations of prompts: training text and evaluation text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def continue_prompts(
    target: PreTrainedModel,
    prompts: list[Tensor],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 64,
) -> list[Tensor]:
    """Continue each prompt ([T_i] int64, not empty) by at most `new_tokens` of the target's own
    tokens, up to an end-of-sequence token, `batch` prompts together: prompt and continuation,
    [T_i + n_i] int64 each, on the CPU. Torch's global generators are left as they were."""
    device = target.device
    ends = target.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.int64, device=device).flatten()
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    texts = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for first in range(0, len(prompts), batch):
            group = prompts[first : first + batch]
            # Left padding, so that all continue at the same column.
            ids, seen = (
                pad_sequence(rows, batch_first=True, padding_side="left").to(device)
                for rows in (group, [torch.ones_like(prompt) for prompt in group])
            )
            output = target.generate(
                ids, attention_mask=seen, max_new_tokens=new_tokens, pad_token_id=0, **sampling
            )[:, ids.shape[1] :]
            ended = torch.isin(output, ends)
            # Columns up to the first end token, included.
            alive = (ended.cumsum(1) - ended.long()) == 0
            new = [row[live].cpu() for row, live in zip(output, alive)]
            texts += [torch.cat(pair) for pair in zip(group, new)]
    return texts
