"""Stages 1 and 2 of the example pair: its tokenizer, and its target, a Llama."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from sizes import Size
from stages import Deadline, OutOfTime
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], out: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `vocab_size` entries over `texts`, saved to `out`."""
    bpe = Tokenizer(models.BPE())
    # Runs of blanks are tokens: indentation is most of what Python repeats.
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All `texts` as one stream of ids [T] int64, each framed by BOS and EOS."""
    stream: list[int] = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        stream += [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    return torch.tensor(stream, dtype=torch.int64)


def target_config(tokenizer: PreTrainedTokenizerFast, size: Size) -> LlamaConfig:
    """The target's architecture."""
    return LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def optimizer_of(model: LlamaForCausalLM, size: Size) -> torch.optim.AdamW:
    """Return the optimiser of all the target's weights."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=size.lr,
        betas=(0.9, 0.95),
        weight_decay=size.weight_decay,
        fused=True,
    )


def train_target(
    stream: torch.Tensor,
    held_out: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    size: Size,
    deadline: Deadline,
    *,
    steps: int,
    seed: int = 0,
    device: str = "cpu",
    compiled: bool = False,
    save_every: int = 200,
) -> dict[str, float]:
    """Train the target on `stream` [T]; resumes from `out/state.pt` if it exists.

    Args:
        stream: training ids [T] int64.
        held_out: ids [T'] int64, for the reported loss only.
        out: where the model goes (safetensors, bf16).
        size: of model, batches and learning rate.
        deadline: when to save and stop.
        steps: optimiser steps.
        compiled: run the step through torch.compile (needs a C++ compiler; 1.5 × on a CPU).

    Returns:
        Figures of the run: held-out loss in nats per token, seconds, tokens.

    Raises:
        OutOfTime: the deadline came before the last step.
    """
    batch, length = size.batch, size.length
    torch.manual_seed(seed)
    model = LlamaForCausalLM(target_config(tokenizer, size)).to(device)
    optimizer = optimizer_of(model, size)
    warmup = max(1, steps // 50)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / warmup, 0.05 + 0.475 * (1 + math.cos(math.pi * s / steps))),
    )
    first, seconds = 0, 0.0
    state_file = out / "state.pt"
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first, seconds = state["step"], state["seconds"]

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), rows[:, 1:].flatten()
        )

    step_loss = torch.compile(loss_of) if compiled else loss_of
    began = time.monotonic()
    bar = tqdm(range(first, steps), initial=first, total=steps, desc="target", mininterval=5)
    for step in bar:
        # Seeded by the step, so that a resumed run sees the batches that an unbroken one would.
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(stream) - length - 1, (batch,), generator=draw)
        rows = stream[starts[:, None] + torch.arange(length + 1)].to(device)
        loss = step_loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
        last, late = step + 1 == steps, deadline.passed()
        if last or late or (step + 1) % save_every == 0:
            elapsed = seconds + time.monotonic() - began
            _save_state(state_file, model, optimizer, schedule, step + 1, elapsed)
        if late and not last:
            raise OutOfTime

    figures = {
        "held_out_loss_nats": held_out_loss(model, held_out, length, device),
        "seconds": seconds + time.monotonic() - began,
        "tokens": float(steps * batch * length),
    }
    model.to(torch.bfloat16).save_pretrained(out)
    return figures


def _save_state(path, model, optimizer, schedule, step: int, seconds: float) -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "step": step,
        "seconds": seconds,
    }
    # Written aside and renamed: a kill in the middle leaves the last whole state.
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, length: int, device: str) -> float:
    """Mean cross-entropy (nats per token) over whole rows of `stream` [T]."""
    rows = stream[: len(stream) // length * length].view(-1, length)
    losses = [
        torch.nn.functional.cross_entropy(
            model(input_ids=chunk.to(device)).logits[:, :-1].flatten(0, 1).float(),
            chunk[:, 1:].flatten().to(device),
        )
        * len(chunk)
        for chunk in rows.split(16)
    ]
    return float(sum(losses) / len(rows))
