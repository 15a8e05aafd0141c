"""What the ranks of a tensor-parallel engine say to each other."""

from __future__ import annotations

import json
import subprocess
import sys

RANK = """
import json, sys
from torch import distributed
from vllm_specblock.engine.ranks import Ranks

number, store = int(sys.argv[1]), distributed.FileStore(sys.argv[2], 2)
distributed.init_process_group("gloo", store=store, rank=number, world_size=2)
ranks, large = Ranks(distributed.group.WORLD), 2**62 - 1
print(json.dumps([ranks.first, [ranks.gather(each) for each in (7, number, large - number)]]))
"""


def test_ranks_see_the_numbers_of_all_in_their_order(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(number), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    gathered = [[7, 7], [0, 1], [2**62 - 1, 2**62 - 2]]
    assert said == [[True, gathered], [False, gathered]]
