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

    def _joined(self) -> list[int]:
        """Indices into `nodes` from best to worst, the best one per text."""
        ranked = [i for i, node in enumerate(self.nodes) if node and node[1] > float("-inf")]
        ranked.sort(key=lambda i: (-self.nodes[i][1], len(self.nodes[i][0]), i))
        first: dict[tuple, int] = {}
        for index in ranked:
            first.setdefault(self.nodes[index][0], index)
        return list(first.values())

    def starts(self, chain_end: int) -> list[int]:
        """Indices into `nodes`, the chain's end first; no text starts twice."""
        free = [
            index
            for index in self._joined()
            if self.nodes[index][4] and self.nodes[index][0] not in self.used
        ]
        chosen = [chain_end, *(index for index in free if index != chain_end)]
        chosen = chosen[: self.shape.num_starts]
        self.used |= {self.nodes[index][0] for index in chosen}
        return chosen

    def finish(self) -> dict[tuple, float]:
        """The best N texts and their scores, in order."""
        return {self.nodes[i][0]: self.nodes[i][1] for i in self._joined()[: self.shape.budget]}
