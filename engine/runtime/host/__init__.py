"""The runner on a CPU, beside `engine.runtime.device` on a GPU.

load      chooses the network: the native kernels (`engine.runtime.native`), else torch
network   the dense decoder in torch, which says what the native kernels compute
runner    executes plans: `slots`, `model`, `torch_paged`, `sampler`
"""
