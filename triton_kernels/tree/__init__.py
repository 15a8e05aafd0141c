"""Tree kernels: selection from candidates, merge, storage by request slot."""
