"""The forward pass in C++ (decoder.cpp), compiled where the package's build found a compiler.

A start chooses the library for the best instruction set of the processor. Without one, or for a model that it
does not implement, the same pass runs in torch (engine/runtime/reference/torch_decoder.py).
"""
