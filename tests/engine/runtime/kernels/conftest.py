"""Kernels run in Triton's interpreter here, on CPU tensors, in float32 and float16.

The interpreter is chosen when Triton is imported, so this has to come before anything imports it. bfloat16 is
left to the GPU: the interpreter computes it wrongly and says nothing.
"""

from __future__ import annotations

import os
import sys

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "triton came before its mode"
os.environ["TRITON_INTERPRET"] = "1"
