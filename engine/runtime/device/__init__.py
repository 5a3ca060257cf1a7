"""The runner on a GPU: the same plans as on a CPU, executed by the kernels of `engine.runtime.kernels`.

Like them, these modules are not imported on a machine without a GPU, except by tests, which put a CPU in the
GPU's place and run the kernels in Triton's interpreter.
"""
