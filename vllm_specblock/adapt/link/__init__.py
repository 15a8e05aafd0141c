"""Links between an engine and its trainer: shared memory, or a folder."""
