"""Ranks and text hashes of a tree's candidates, one int64 each.

A key sorts candidates, best first: bits 32-62 hold -score (as float bits; +inf: not wanted), bits
24-31 the depth, bits 0-23 the index. Ties go to the shallower, then to the earlier candidate.
Candidate 0 is the root.
"""

CLOSED = 0x7F800000 << 32
"""Key of a score of -inf: nodes have smaller keys."""
ROOT_HASH = 1
"""Not 0, so that a leading token 0 counts."""
MAX_DEPTH = 255
DEPTH_ONE = 1 << 24
"""Increment of a key per token of a path."""
INDEX_BITS = DEPTH_ONE - 1
FIRST = -(1 << 63)
"""Key bit that sorts before all others."""
PATH_FACTOR = -7046029254386353131
"""The hash of a text is its last token + PATH_FACTOR · the hash of its prefix, wrapping."""
