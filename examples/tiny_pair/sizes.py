"""How large a pair is: its target, what the drafter learns from, and the drafter's training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Numbers of one pair.

    Attributes:
        vocab_size: entries of the tokenizer.
        hidden_size, intermediate_size, layers, heads, kv_heads: of the target, a Llama. Seven
            layers are the fewest whose three feature layers differ (2, N/2, N-3).
        steps: updates of the target, each of `batch` windows of `length` tokens.
        lr, weight_decay: of the target's AdamW; lr is the peak.
        answers: texts by the target that the drafter learns from.
        windows: texts of the corpus that it learns from as well.
        window: tokens of one text, of which an answer's prompt takes `prompt`.
        answer_batch: answers that are written at once; sampled ones change with it.
        draft_vocab_size, drafter_steps, drafter_batch, drafter_lr: of the drafter's training.
        files: of the corpus; None takes all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    steps: int
    batch: int
    length: int
    lr: float
    weight_decay: float
    answers: int
    windows: int
    window: int
    prompt: int
    answer_batch: int
    draft_vocab_size: int
    drafter_steps: int
    drafter_batch: int
    drafter_lr: float
    files: int | None = None


SIZES = {
    # 3.1 M parameters: a laptop.
    "tiny": Size(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        layers=7,
        heads=6,
        kv_heads=2,
        steps=2000,
        batch=16,
        length=384,
        lr=2e-3,
        weight_decay=0.05,
        answers=3072,
        windows=3072,
        window=256,
        prompt=80,
        answer_batch=64,
        draft_vocab_size=1536,
        drafter_steps=1500,
        drafter_batch=8,
        drafter_lr=2e-3,
    ),
    # 99.5 M parameters: one GPU. examples/stdlib_100m says why it learns for so few updates.
    "100m": Size(
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2688,
        layers=12,
        heads=12,
        kv_heads=4,
        steps=2000,
        batch=32,
        length=512,
        lr=1e-3,
        weight_decay=0.1,
        answers=6144,
        windows=4096,
        window=256,
        prompt=64,
        answer_batch=256,
        draft_vocab_size=6144,
        drafter_steps=2000,
        drafter_batch=32,
        drafter_lr=6e-4,
    ),
    # For tests: learns nothing, and goes through every stage in seconds.
    "nano": Size(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        layers=7,
        heads=2,
        kv_heads=1,
        steps=3,
        batch=2,
        length=64,
        lr=2e-3,
        weight_decay=0.05,
        answers=16,
        windows=16,
        window=48,
        prompt=16,
        answer_batch=16,
        draft_vocab_size=256,
        drafter_steps=2,
        drafter_batch=2,
        drafter_lr=2e-3,
        files=8,
    ),
}
