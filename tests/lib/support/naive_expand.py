"""Rank-guided expansion once more, in plain Python for one request: what `expand` is held to."""

from __future__ import annotations


class NaiveExpansion:
    """Candidates as a list; equal texts are joined level by level over a dictionary."""

    def __init__(self, shape):
        self.shape = shape
        self.nodes = []  # (text, score, row, position, may start)
        self.rows = 0
        self.used = set()

    def attach(self, text: tuple, score: float, logprob, token, bucket) -> None:
        """One caterpillar below a node of `text` and `score`: logprob, token [K][B], bucket [K]."""
        for k, (scores, tokens) in enumerate(zip(logprob, token)):
            width = self.shape.branching[bucket[k]]
            for b in range(self.shape.width):
                if b == 0 or b < width:
                    self.nodes.append(
                        ((*text, tokens[b]), score + scores[b], self.rows, k, width > 0)
                    )
                else:
                    self.nodes.append(None)
            text, score = (*text, tokens[0]), score + scores[0]
        self.rows += 1
        self.chain_end = len(self.nodes) - self.shape.width

    def skip(self) -> None:
        """A row that does not exist, for the numbering's sake."""
        self.nodes += [None] * (self.shape.block_size * self.shape.width)
        self.rows += 1

    def starts(self, chain_end: int) -> list[int]:
        """Indices into `nodes`, the chain's end first."""
        free = [
            index
            for index, node in enumerate(self.nodes)
            if node and node[4] and index not in self.used and index != chain_end
        ]
        free.sort(key=lambda index: (-self.nodes[index][1], index))
        chosen = [chain_end, *free[: self.shape.num_starts - 1]]
        self.used |= set(chosen)
        return chosen

    def finish(self) -> dict[tuple, float]:
        """The best N texts and their scores."""
        best: dict[tuple, float] = {}
        for node in filter(None, self.nodes):
            best[node[0]] = max(best.get(node[0], float("-inf")), node[1])
        kept = sorted(best.items(), key=lambda item: -item[1])[: self.shape.budget]
        return dict(kept)
