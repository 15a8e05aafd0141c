"""Verification results for the estimators."""

from __future__ import annotations

from functools import cached_property

import torch

from vllm_specblock.triton_kernels.verify.verification_result import VerificationResult


class VerifiedTrees(VerificationResult):
    """A `VerificationResult` with derived tensors for the torch forms of kernels."""

    _fields = VerificationResult._fields  # some releases of Triton look in the class itself

    @cached_property
    def temperature(self) -> torch.Tensor:
        """[R] fp32, of each request."""
        return self.temperatures[self.req_idx]

    @cached_property
    def authors(self) -> torch.Tensor:
        """[R, N] uint8, `origin` of each request."""
        return self.origin[self.req_idx]

    @cached_property
    def live(self) -> torch.Tensor:
        """[R] bool, the target verified a tree of ours."""
        return (self.num_run > 0) & (self.authors[:, 0] > 0)

    @cached_property
    def logprob(self) -> torch.Tensor:
        """[R, N] fp32, `score` of each request."""
        return self.score[self.req_idx]

    @cached_property
    def judged(self) -> torch.Tensor:
        """[R, N] bool, our verified nodes."""
        node = torch.arange(self.origin.shape[1], device=self.origin.device)
        return (node < self.num_run[:, None]) & (self.authors > 0)

    @cached_property
    def reached(self) -> torch.Tensor:
        """[R, N] bool, nodes on the accepted path."""
        counts = torch.arange(self.path.shape[1], device=self.path.device)
        counts = counts <= self.accepted[:, None]
        shape = len(self.path), self.origin.shape[1] + 1
        found = torch.zeros(shape, dtype=torch.bool, device=self.path.device)
        return found.scatter_(1, torch.where(counts, self.path, 0), True)[:, 1:]

    def of_drafter(self, drafter: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the expected and accepted tokens of a drafter's (0 or 1) nodes, and if it has any.

        [R] fp32, the sum of exp(logprob); [R] int64; [R] bool. Nodes of both count for both.
        """
        mine = self.judged & (self.authors & (1 << drafter) > 0)
        expected = torch.where(mine, self.logprob.exp(), 0).sum(1)
        return expected, (mine & self.reached).sum(1), mine.any(1)
