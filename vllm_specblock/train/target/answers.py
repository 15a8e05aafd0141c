"""Target continuations of prompts: training text and evaluation text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
    tokens, up to an end-of-sequence token, `batch` prompts together.

    Returns:
        Prompt and continuation, [T_i + n_i] int64 each, on the CPU. Sampling draws from torch's
        global generator.
    """
    device = target.device
    ends = target.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.int64, device=device).flatten()
    torch.manual_seed(seed)
    texts = []
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        width = max(len(prompt) for prompt in group)
        # Padded on the left, so that all of them go on at the same column.
        ids = torch.zeros(len(group), width, dtype=torch.int64)
        seen = torch.zeros_like(ids)
        for row, prompt in enumerate(group):
            ids[row, width - len(prompt) :] = prompt
            seen[row, width - len(prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = target.generate(
            ids.to(device),
            attention_mask=seen.to(device),
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **sampling,
        )[:, width:]
        ended = torch.isin(output, ends)
        # Columns up to and with the first end.
        alive = (ended.cumsum(1) - ended.long()) == 0
        texts += [
            torch.cat([prompt, new[live].cpu()]) for prompt, new, live in zip(group, output, alive)
        ]
    return texts
