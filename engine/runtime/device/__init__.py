"""The runner on a GPU: the same plans as on a CPU, executed by the kernels of `engine.runtime.kernels`.

Like them, nothing here is imported on a machine without a GPU, except by tests: they put a CPU in its place,
with the kernels in Triton's interpreter.
"""
