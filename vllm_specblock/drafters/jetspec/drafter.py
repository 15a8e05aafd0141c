"""JetSpec drafter: an existing checkpoint, of whose causal block the best paths make a tree.

The network and its block are DFlash's, and so is what a tree is made of: one distribution per mask,
which all nodes of a depth share. The authors' tree takes the likeliest node that has no children
yet and gives it the `tree_width` likeliest tokens of the next mask, until N nodes are there; here
it is the N likeliest paths, of which that tree leaves some out.
"""

from __future__ import annotations

from torch import Tensor

from vllm_specblock.drafters.dflash.drafter import DFlashDrafter


class JetSpecDrafter(DFlashDrafter):
    """Differs in that no row of a block sees a later one; arguments as `DFlashDrafter` has them."""

    kind = "jetspec"

    def sees(self) -> Tensor:
        """[1 + masks, 1 + masks] bool, which rows of its block a row sees: those up to itself."""
        return super().sees().tril()
