"""Two artificial domains, in each of which the next token is a function of the last: a drafter that
knows one of them knows nothing of the other."""

from __future__ import annotations

import torch
from lib.simulation import record_of
from lib.streams import HOME
from support.records import HIDDEN, small_drafter

from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.adapt.learning.update import AdaptationConfig, Updater
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.learner import EvalSequence

VOCAB = 32


class World:
    """A target whose states are noise around the token, and whose law is nearly one token."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB, HIDDEN, generator=self.draw)
        self.mix = torch.randn(HIDDEN, 3 * HIDDEN, generator=self.draw) / HIDDEN**0.5
        # Two cycles through all tokens.
        orders = [torch.randperm(VOCAB, generator=self.draw) for _ in range(2)]
        self.after = [
            torch.empty(VOCAB, dtype=torch.int64).scatter_(0, order, order.roll(-1))
            for order in orders
        ]
        self.head = torch.nn.functional.normalize(self.table, dim=1)
        self.teacher = RecordTeacher(self.table, self.head)

    def sequence(self, domain: int) -> EvalSequence:
        """A text of a domain, with a leap elsewhere at one token in twenty."""
        token = torch.randint(VOCAB, (1,), generator=self.draw)
        tokens = [token]
        for _ in range(43):
            leap = float(torch.rand(1, generator=self.draw)) < 0.05
            other = torch.randint(VOCAB, (1,), generator=self.draw)
            tokens.append(other if leap else self.after[domain][tokens[-1]])
        return self.along(torch.cat(tokens))

    def along(self, text: torch.Tensor) -> EvalSequence:
        """What the target gives of any text."""
        length = len(text)
        noise = 0.1 * torch.randn(length, HIDDEN, generator=self.draw)
        hidden = (self.table[text] + noise) @ self.mix
        return EvalSequence(
            text, 8, hidden, 6 * self.head[text.roll(-1)] + noise, self.teacher.embed
        )

    def random_text(self, length: int = 44) -> torch.Tensor:
        """Tokens that follow from nothing."""
        return torch.randint(VOCAB, (length,), generator=self.draw)

    def drafter(self) -> SpecBlockModel:
        """One that has learned home."""
        drafter = small_drafter(vocab=VOCAB)
        updater = Updater(drafter, AdaptationConfig(lr=5e-3))
        for step in range(60):
            records = [record_of(f"{step} {n}", self.sequence(HOME)) for n in range(4)]
            updater.update(Action.FULL, [self.teacher.train_batch(records, step, step)])
        return drafter.requires_grad_(True)
