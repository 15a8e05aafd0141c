"""What several benchmarks share.

Benchmarks are run as files, so that Python looks in their folder. With `python -m` the root of the
repository would be on the path, and vLLM would take `triton_kernels/` there for the kernels that
it ships.
"""
