"""Triton's interpreter without what it does in vain, and with the same sums on every processor.

**Less than half of the time.** Kernels of test sizes spend little of it on numbers. Before each launch, and
again for each function that a kernel calls, the interpreter searches all of `triton.language` for what it
replaces, though that is always the same and, inside a launch, replaced already. Each sum of integers is
computed once more in int64 to look for an overflow, which is then reported to nobody: its option `debug` is
off. And what depends on types and shapes alone is worked out again for every operation.

What takes the place of Triton's functions here has the same results, or hands over to them:
test_interpreter.py compares.

**Sums of one order.** The interpreter leaves `tl.dot` to NumPy's BLAS, whose kernels differ between
processors; on some, a row's sum depends on where in the matrix the row stands. On a GPU it depends on the row
alone, and tests hold the kernels to that, bit by bit. So a product's terms are added here by halves: the
second half of them to the first, until one is left.

**No waits.** Triton's interpreter knows none of the instructions by which kernels overlap: they do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Attributes = dict[tuple[Any, str], Any]
"""By whose they are, and by name."""

_languages: dict[int, set[int]] = {}
"""By a module's globals (by `id`): the languages in them (by `id`)."""
_ready: set[int] = set()
"""Languages (by `id`) that are replaced while a kernel runs."""
_wrapped: dict[Any, list[tuple[str, Any]]] = {}
"""By part of a language: its built-in functions, as a kernel is to find them."""
_np_dtypes: dict[str, Any] = {}
"""By name of an element type."""
_blocks: dict[tuple[Any, ...], tl.block_type] = {}
"""By shape: the first of its kind."""
_block_names: dict[tuple[tuple[Any, ...], str], str] = {}
"""By shape and name of the element type."""
_tensor_shapes: dict[tuple[int, ...], tuple[tl.constexpr, tl.tuple]] = {}
"""By shape, as types have it: the number of elements, and the shape as tensors have it."""
_own: Attributes = {}
"""What is replaced for good: by where and by name, what was there."""


def _restore(scope: Any) -> None:
    _own[interpreter._LangPatchScope, "restore"](scope)
    _ready.clear()


def _patch_lang(kernel: Any) -> Any:
    names = kernel.__globals__
    if (needed := _languages.get(id(names))) is None:
        needed = {id(value) for value in names.values() if value is tl or value is tl.core}
        _languages[id(names)] = needed
    if needed and needed <= _ready:
        return interpreter._LangPatchScope()
    _ready.update(needed)
    return _own[interpreter, "_patch_lang"](kernel)


def _patch_builtin(part: Any, builder: Any, scope: Any) -> None:
    if part not in _wrapped:
        first = interpreter._LangPatchScope()
        _own[interpreter, "_patch_builtin"](part, builder, first)
        _wrapped[part] = [(name, getattr(part, name)) for _, name, _ in first._changes]
        _own[interpreter._LangPatchScope, "restore"](first)
    for name, wrapper in _wrapped[part]:
        scope.set_attr(part, name, wrapper)


def _get_np_dtype(dtype: tl.dtype) -> Any:
    name = "pointer" if dtype.scalar.is_ptr() else dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _own[interpreter, "_get_np_dtype"](dtype)
    return _np_dtypes[name]


def _shape(of_type: tl.dtype) -> list[int]:
    return of_type.shape.values if of_type.is_block() else []


def _broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if _shape(lhs.type) == _shape(rhs.type):
        return lhs, rhs
    both: tuple[tl.tensor, tl.tensor] = _own[TritonSemantic, "broadcast_impl_value"](self, lhs, rhs)
    return both


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    sizes = tuple(shape)
    like = _blocks.get(sizes)
    if like is None:
        _own[tl.block_type, "__init__"](self, element_ty, shape)
        _blocks[sizes] = self
    else:
        self.element_ty, self.shape, self.numel = element_ty, like.shape, like.numel
        of = sizes, element_ty.name
        if (name := _block_names.get(of)) is None:
            name = _block_names[of] = f"<{self.shape}, {element_ty}>"
        self.name = name


def _init_tensor(self: tl.tensor, handle: Any, of_type: tl.dtype) -> None:
    sizes = tuple(_shape(of_type))
    if sizes not in _tensor_shapes:
        _own[tl.tensor, "__init__"](self, handle, of_type)
        _tensor_shapes[sizes] = self.numel, self.shape
    self.handle, self.type, self.dtype = handle, of_type, of_type.scalar
    self.numel, self.shape = _tensor_shapes[sizes]


def _operand(handle: interpreter.TensorHandle) -> Any:
    """The handle's array, as Triton's own product reads it: fp8 by way of float16."""
    if handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating():
        return interpreter._convert_float(handle.data, handle.dtype, tl.float16, None).view(np.float16)
    return handle.data


def _dot(
    builder: Any,
    a: interpreter.TensorHandle,
    b: interpreter.TensorHandle,
    d: interpreter.TensorHandle,
    input_precision: object,
    max_num_imprecise_acc: object,
) -> interpreter.TensorHandle:
    """a [..., M, K] @ b [..., K, N] + d [..., M, N] in d's type; K is a power of two, as all of Triton's
    sizes are."""
    left, right = _operand(a), _operand(b)
    terms = np.multiply(left[..., None], right[..., None, :, :], dtype=d.data.dtype)
    while half := terms.shape[-2] // 2:
        terms = terms[..., :half, :] + terms[..., half:, :]
    return interpreter.TensorHandle(terms[..., 0, :] + d.data, d.dtype.scalar)


def _nothing(*_: object, **__: object) -> None:
    """Nothing: kernels run one after another, and there is no cache to fetch into."""


def prepare_interpreter() -> None:
    """Replace the interpreter's functions in this process. Change nothing where kernels are compiled."""
    if _own or not triton.knobs.runtime.interpret:
        return
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(tl.extra.cuda, name, _nothing)
    tl.inline_asm_elementwise = _nothing
    interpreter.InterpreterBuilder.create_dot = _dot  # stays when `as_triton_has_it` takes the rest back
    options = interpreter.interpreter_builder.options
    quick = {
        (interpreter._LangPatchScope, "restore"): _restore,
        (interpreter, "_patch_lang"): _patch_lang,
        (interpreter, "_patch_builtin"): _patch_builtin,
        (interpreter, "_get_np_dtype"): _get_np_dtype,
        (TritonSemantic, "broadcast_impl_value"): _broadcast,
        (tl.block_type, "__init__"): _init_block_type,
        (tl.tensor, "__init__"): _init_tensor,
        (interpreter.interpreter_builder, "options"): replace(options, sanitize_overflow=options.debug),
    }
    _own.update(_put(quick))


def _put(attributes: Attributes) -> Attributes:
    """Returns what was there before."""
    before = {(where, name): getattr(where, name) for where, name in attributes}
    for (where, name), value in attributes.items():
        setattr(where, name, value)
    return before


@contextmanager
def as_triton_has_it() -> Iterator[None]:
    quick = _put(_own)
    try:
        yield
    finally:
        _put(quick)
