"""Adaptation from finished requests: book → policy → update → judge → offer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch

from vllm_specblock.adapt.book import Book, Record
from vllm_specblock.adapt.learning.judge import Judge, Weighed, is_sure, steps_of
from vllm_specblock.adapt.learning.pool import Pool, Version
from vllm_specblock.adapt.learning.train_batches import RecordTeacher, batches
from vllm_specblock.adapt.learning.update import AdaptationConfig, Updater
from vllm_specblock.adapt.policy.actions import Tensors, held, put
from vllm_specblock.adapt.policy.evidence import FallDetector, Usual
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest, Policy
from vllm_specblock.drafters.specblock.model import SpecBlockModel

AGAIN, AGAIN_SURE = 4, 2.0
"""Minimum texts after which a refused version may serve after all, and the standard errors by which
it must be better on them."""

Count = Callable[[str, int], None]
"""Increments a metric, named without `adapt_` (`engine/metrics/exporter.py`)."""


class Adaptation:
    """One policy over the requests of one engine.

    Args:
        drafter: θ_0, float32; it is copied.
        seconds_lost: maps an action and its update's seconds to the serving time lost.

    Attributes:
        pool: `pool.current` is the version to serve.
        training: the version of θ_train.
        number: number of the newest version.
        rows: labels trained on so far.
        compared: versions compared with the serving one since the start or an alarm.
    """

    def __init__(
        self,
        drafter: SpecBlockModel,
        teacher: RecordTeacher,
        policy: Policy,
        config: AdaptationConfig | None = None,
        count: Count = lambda name, by: None,
        seconds_lost: Callable[[Action, float], float] = lambda action, seconds: 0.0,
    ) -> None:
        self.policy, self.teacher, self.config = policy, teacher, config or AdaptationConfig()
        self.count, self.seconds_lost = count, seconds_lost
        self.updater = Updater(copy.deepcopy(drafter), self.config, policy.rejected_only)
        self.judge = Judge(drafter, teacher, self.config.num_blocks)
        self.book = Book(self.config.memory, seed=self.config.seed)
        origin = Version(0, _on_host(held(drafter, Action.FULL)))
        self.pool, self.training = Pool(origin), origin
        self.falls, self.usual = FallDetector(), Usual()
        self._weighed: Weighed | None = None
        self.number = self.rows = self.compared = 0

    def finish(self, record: Record | None, request: FinishedRequest | None) -> None:
        """Learn from one finished request, see `Finished`."""
        hard = request is None or self.usual.is_hard(request.tau)
        if record is not None:
            self._keep(record, hard)
        if request is None:
            return
        if self.falls.add(request.tau):
            self.falls.reset()
            self._reward()  # later texts are of another domain
            self.policy.alarm()
            self.compared = 0
            if self.policy.gated:
                self._begin_anew()
        decision = self.policy.decide(request)
        if decision.good:
            self.pool.call_good()
        if decision.roll_back and (back := self.pool.roll_back()):
            self._follow(back)
        if decision.update:
            self._update(decision.push)

    def adopt(self, version: Version) -> None:
        """Serve a version of an earlier trainer or the user's choice, and train from it."""
        self.number = max(self.number, version.number)
        self.pool.offer(version)
        self.pool.call_good()
        self._train_from(version)

    def gain_over_origin(self, version: Version) -> float:
        """Judged, tokens per row; NaN: nothing was judged yet."""
        return self.judge.difference(version, self.pool.origin, self.book)

    def _keep(self, record: Record, hard: bool) -> None:
        if not self.book.add(record):
            self.count("dropped_records", 1)
            return
        if self._weighed is not None:
            self._weigh(self._weighed, record, hard)
        if not self.policy.gated:
            return
        depths = {each.number: self.judge.depth(each, record) for each in self.pool.kept}
        gain = depths[self.pool.current.number] - depths[self.pool.origin.number]
        if gain == gain:  # else the text is too short
            self.count("judged_requests", 1)
            self.count("judged_gain_millitokens", round(1000 * gain))
        steps = {number: steps_of(depth) for number, depth in depths.items()}
        if (back := self.pool.judge(steps)) is not None:
            self._follow(back)

    def _weigh(self, weighed: Weighed, record: Record, hard: bool) -> None:
        """Compare an update's version with the serving one, and on hard requests with its
        predecessor: a gain on the few requests of a new domain would drown in the others."""
        before, current = (
            self.judge.steps(each, record) for each in (weighed.before, self.pool.current)
        )
        if before == before:
            after = self.judge.steps(weighed.after, record)
            weighed.saved.append(current - after)
            if hard:
                weighed.steps.append((before, after))
        self._look_again(weighed)
        if len(weighed.steps) >= self.config.every:
            self._reward()

    def _look_again(self, weighed: Weighed) -> None:
        """Serve a refused version if the newest texts favour it: after a change of domain, dozens
        of judged requests are still of the previous one."""
        after, serves = weighed.after, self.pool.current
        if after is not self.training or after is serves or serves is not weighed.serves:
            return
        found = weighed.saved
        if len(found) >= AGAIN and is_sure([found], AGAIN_SURE):
            self._serve(after)

    def _reward(self) -> None:
        weighed, self._weighed = self._weighed, None
        if weighed is not None:
            self.policy.reward(weighed.action, weighed.gain, weighed.seconds, weighed.error)

    def _update(self, action: Action) -> None:
        self._reward()
        config, before = self.config, self.training
        found = batches(self.book, config.every, not self.policy.rejected_only)
        if not found:
            return
        train_batches = [
            self.teacher.train_batch(records, number, config.seed * 1_000_003 + number)
            for number, records in enumerate(found, self.updater.steps)
        ]
        began = time.perf_counter()
        losses = self.updater.update(action, train_batches)
        seconds = time.perf_counter() - began
        self.rows += sum(int(each.labels.sum()) for records in found for each in records)
        self.count(f"updates_{action}", 1)
        self.count(f"update_microseconds_{action}", round(1e6 * seconds))
        if losses:
            self._offer(action, before)
        seconds = self.seconds_lost(action, seconds)
        if self.policy.gated:
            current = self.pool.current
            self._weighed = Weighed(action, before, self.training, current, seconds)

    def _offer(self, action: Action, before: Version) -> None:
        """Make a version of θ_train, and serve it if it is better."""
        tensors = _on_host(held(self.updater.drafter, action, before.tensors))
        if not all(bool(torch.isfinite(each).all()) for each in tensors.values()):
            self.count("versions_refused_weights", 1)
            self._train_from(before)
            return
        self.number += 1
        self.training = Version(self.number, tensors, action, before.number)
        self.compared += 1
        if not self.policy.gated or self.judge.is_better(
            self.training, self.pool.current, self.book, self.compared
        ):
            self._serve(self.training)
        else:
            self.count("versions_refused_not_better", 1)

    def _serve(self, version: Version) -> None:
        self.pool.offer(version)
        self.count("versions_offered", 1)

    def _begin_anew(self) -> None:
        """Train from the last good version; with old moments the first steps would be small."""
        if back := self.pool.roll_back():
            self._follow(back)
        else:
            self._train_from(self.pool.current)

    def _follow(self, version: Version) -> None:
        self.count("rollbacks", 1)
        self._train_from(version)

    def _train_from(self, version: Version) -> None:
        put(self.updater.drafter, version.tensors)
        self.updater.forget()
        self.training = version


def _on_host(tensors: Tensors) -> Tensors:
    return {name: tensor.cpu() for name, tensor in tensors.items()}
