"""The forward pass in C++, where a compiler was there when the package was built; see decoder.cpp.

Chosen when the runner is loaded, with the best instruction set that the processor has. Without it, or for
a model it does not take, the same pass runs in torch (engine/runtime/host/model.py).
"""
