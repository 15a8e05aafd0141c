"""How candidates of a tree are ranked and their texts told apart: one int64 each.

A key orders candidates, smallest first: bits 32-62 hold -score (a float that is not negative
orders as its bits do; not wanted is +inf), bits 24-31 the depth, bits 0-23 the candidate's index.
Ties thus go to the shallower, then to the earlier candidate, and a sorted key says by itself
which candidate it was. Candidate 0 is the root.
"""

CLOSED = 0x7F800000 << 32
"""Key of a score of -inf: what is not below it is not a node."""
ROOT_HASH = 1
"""Not 0: a leading token 0 has to count."""
MAX_DEPTH = 255
DEPTH_ONE = 1 << 24
"""What one more token on a path adds to a key."""
INDEX_BITS = DEPTH_ONE - 1
FIRST = -(1 << 63)
"""Put in a key, this bit sorts it before all others."""
PATH_FACTOR = -7046029254386353131
"""The hash of a text is its last token + PATH_FACTOR · the hash of what is before, wrapping."""
