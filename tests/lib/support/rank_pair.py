"""Two processes that stand for an engine's ranks, and what their drafters serve turn by turn."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.adapting import VOCAB, Pair
from support.records import small_drafter
from torch import distributed

from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.link.layout import LinkSizes, shapes_of
from vllm_specblock.adapt.link.memory_link import EngineLink, TrainerLink
from vllm_specblock.adapt.link.shared_versions import RankLink
from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.common.post_load import process_after_loading
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import HEADS, Refresh, held, prepare
from vllm_specblock.engine.versions import rank_links
from vllm_specblock.engine.versions.drafter_versions import Versions
from vllm_specblock.engine.versions.rank_versions import EVERY, RankVersions
from vllm_specblock.engine.versions.ranks import Ranks

SIZE = 2


class RankPair:
    """Both processes, for one script after another: they take seconds to come up.

    Args:
        folder: in which they meet.
    """

    def __init__(self, folder: Path) -> None:
        # A fork of this process would lack the threads that its tensors are computed by.
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(SIZE)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_rank, args=(number, folder, theirs), daemon=True)
            for number, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, script: Callable[..., Any], *args: Any) -> list[Any]:
        """What a script returns on each rank; it is given `Ranks`, its number and the arguments.

        Raises:
            AssertionError: a rank failed, or took more than two minutes.
        """
        for pipe in self._pipes:
            pipe.send((script, args))
        for pipe in self._pipes:
            assert pipe.poll(120), "a rank takes too long"
        found = [pipe.recv() for pipe in self._pipes]
        assert not any(isinstance(each, str) for each in found), found
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _rank(number: int, folder: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), SIZE)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=SIZE)
    ranks = Ranks(distributed.group.WORLD)
    while True:
        script, args = pipe.recv()
        try:
            pipe.send(script(ranks, number, *args))
        except Exception:
            pipe.send(traceback.format_exc())


# ---- drafters and versions ----


def weights(seed: int) -> dict[str, torch.Tensor]:
    made = small_drafter(seed, vocab=VOCAB)
    return {name: value.detach() for name, value in made.named_parameters()}


def served(seed: int) -> SpecBlockModel:
    return process_after_loading(small_drafter(seed, vocab=VOCAB).eval(), None)


def digest(drafter: SpecBlockModel) -> str:
    """Of every tensor that serves, bit for bit."""
    found = sha256()
    for _, value in sorted(held(drafter)):
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:8]


def digest_of(seed: int) -> str:
    return digest(served(seed))


class Script:
    """A link at which versions turn up when a script says.

    Args:
        arrivals: by turn, the version's number, whose weights are of that seed; negative: with a
            number that is not finite.
    """

    def __init__(self, arrivals: dict[int, int]) -> None:
        self.arrivals, self.now = arrivals, 0
        self.taken: list[tuple[int, int]] = []
        self.refused: list[int] = []

    def staged(self) -> StagedVersion | None:
        come = [turn for turn in self.arrivals if turn <= self.now]
        if not come:
            return None
        number = [self.arrivals.pop(turn) for turn in sorted(come)][-1]
        tensors = weights(abs(number))
        if number < 0:
            tensors["norm.weight"] = tensors["norm.weight"] * float("nan")
        return StagedVersion(abs(number), -1, Action.FULL, tensors, 2 * abs(number))

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        self.taken.append((self.now, version.number))

    def refuse(self, version: StagedVersion, reason: str = "not finite") -> None:
        self.refused.append(version.number)

    @property
    def counts(self) -> dict[str, int]:
        return {}


def versions_of(model: SpecBlockModel, link: Any, ranks: Ranks, late: int = 0) -> Any:
    """late: a version is prepared beside up to so many turns, as for a GPU."""
    drafter, refresh = SimpleNamespace(model=model), Refresh(model)
    if late:
        draw = random.Random(late)
        pool: Any = SimpleNamespace(
            submit=lambda _, *args: Late(partial(prepare, *args), draw.randint(late // 2, late))
        )
        refresh._pool = pool
    return RankVersions(Versions(drafter, link), ranks, refresh)


class Late:
    """A future that is done after some turns."""

    def __init__(self, call: Callable[[], Any], turns: int) -> None:
        self.result, self.turns = call, turns

    def done(self) -> bool:
        self.turns -= 1
        return self.turns < 0


# ---- scripts ----


def scripted(
    ranks: Ranks,
    number: int,
    arrivals: list[dict[int, int]],
    turns: int,
    late: tuple[int, int] = (0, 0),
) -> SimpleNamespace:
    """What serves after each turn.

    Args:
        late: per rank, see `versions_of`.
    """
    model, link = served(0), Script(arrivals[number])
    versions, seen = versions_of(model, link, ranks, late[number]), []
    for link.now in range(1, turns + 1):
        versions.turn()
        seen.append(digest(model))
    return SimpleNamespace(seen=seen, taken=link.taken, refused=link.refused)


def over_memory(ranks: Ranks, number: int, offers: int) -> SimpleNamespace:
    """A trainer replaces what it staged at any moment, while both ranks read and turn."""
    torch.manual_seed(number)
    model, draw = served(0), random.Random(number)
    shapes = shapes_of(small_drafter(vocab=VOCAB).config)
    ends = threading.Event()
    link: Any
    if ranks.first:
        link = EngineLink(LinkSizes(shapes, 32))
        trainer = TrainerLink(link.descriptor, shapes)
        trainer.staging.know(weights(0))
        ranks.from_first([os.getpid(), link.descriptor])

        def train() -> None:
            now = weights(0)
            for seed in range(1, offers + 1):
                new = weights(seed)
                if seed % 3:
                    new = now | {n: each for n, each in new.items() if n.startswith(HEADS)}
                trainer.stage(Version(seed, new, Action.FULL, seed - 1))
                now = new
                time.sleep(draw.choice([0.0, 0.05, 0.5]))
            ends.set()

        threading.Thread(target=train, daemon=True).start()
    else:
        link = RankLink(*ranks.from_first([0, 0]), shapes)
    versions, seen, left = versions_of(model, link, ranks), [], 10
    while left:
        for _ in range(EVERY):
            versions.turn()
            seen.append(digest(model))
            time.sleep(draw.choice([0, 0, 1e-4, 1e-3]))
        # Ranks turn alike, so the first one says when to end.
        left -= ranks.from_first([ends.is_set()])[0]
    return SimpleNamespace(seen=seen, counts=link.counts)


def linked_to_folder(ranks: Ranks, number: int, folder: Path) -> SimpleNamespace:
    """A start with a version that is current, and another that is chosen while it serves."""
    model, pair = served(3), Pair.at(folder / "pair")
    kept = VersionFolder(folder / "requests/versions", pair.drafter, pair.target)
    drafter: Any = SimpleNamespace(model=model)
    versions, sink = rank_links.link_to_folder(ranks, drafter, folder / "requests", kept, 512)
    seen = [digest(model)]
    if ranks.first:
        kept.use(None, who="person")
    for _ in range(8 * EVERY):
        versions.turn()
        seen.append(digest(model))
        time.sleep(0.01)
    return SimpleNamespace(seen=seen, sink=type(sink).__name__, counts=versions.link.counts)


def linked_to_process(ranks: Ranks, number: int, folder: Path, bad: bool) -> SimpleNamespace:
    """A start with a version that is current: which one, changes before the second rank reads.

    Args:
        bad: the second rank cannot read it.
    """
    model, pair, reads = served(3), Pair.at(folder / "pair"), 0
    drafter: Any = SimpleNamespace(model=model)
    told = TrainerConfig(str(pair.drafter), str(pair.target))

    def current() -> StagedVersion | None:
        nonlocal reads
        reads += 1
        if bad:
            return None if number else StagedVersion(5, -1, Action.FULL, weights(5), checksum=5)
        seed = 7 if number or reads > 1 else 6
        return StagedVersion(seed, -1, Action.FULL, weights(seed), checksum=seed)

    started: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_links.TrainerProcess, "start", lambda self: started.append("trainer"))
        sizes = LinkSizes(shapes_of(small_drafter(vocab=VOCAB).config), 32)
        versions, sink = rank_links.link_to_process(ranks, drafter, told, sizes, current)
    seen = [digest(model)]
    for _ in range(2 * EVERY):
        versions.turn()
        seen.append(digest(model))
    return SimpleNamespace(seen=seen, sink=type(sink).__name__, started=started, reads=reads)
