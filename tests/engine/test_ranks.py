"""What the ranks of a tensor-parallel engine say to each other."""

from __future__ import annotations

from multiprocessing import get_context

from torch import distributed

from vllm_specblock.engine.ranks import Ranks


def say(number: int, folder, pipe) -> None:
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=2)
    ranks = Ranks(distributed.group.WORLD)
    large = 2**62 - 1
    alike = [ranks.alike(each) for each in (7, number, large, -large, large * (1 - 2 * number))]
    pipe.send((ranks.first, alike, ranks.from_first([large - number, 3 + number])))


def test_ranks_agree_and_the_first_decides(tmp_path):
    context, pipes = get_context("fork"), []
    for number in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=say, args=(number, tmp_path, theirs), daemon=True).start()
        pipes.append(ours)
    alike, decided = [True, False, True, True, False], [2**62 - 1, 3]
    assert all(pipe.poll(60) for pipe in pipes)
    assert [pipe.recv() for pipe in pipes] == [(True, alike, decided), (False, alike, decided)]
