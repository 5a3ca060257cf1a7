"""Triton kernels for one NVIDIA GPU, Hopper first.

Nothing outside this package imports Triton, and nothing imports this package on a machine without a GPU,
except tests: they run the kernels in Triton's interpreter, and compile them for sm_90.

Rules of every kernel here:

  1. A row's numbers depend on that row alone: the order of every sum follows from the row's own length,
     never from the rest of the batch, the number of programs, or the order in which they run.
  2. Memory that no row owns may hold NaN. It is masked when it is loaded, not afterwards: zero times NaN
     is NaN.
  3. All that changes from step to step is read on the device. A launch's grid and arguments are the same
     for every step of a batch size, so that a CUDA graph can hold it.
  4. Offsets into the cache are 64 bits wide: a pool of pages outgrows 2^31 elements.
"""
