"""Reads weights from safetensors on disk into tensors.

A network is built by asking a `WeightSource` for one parameter after another, by the checkpoint's
names and with the shape it expects. All parameters are asked for twice: first of an `Inspection`, which reads
file headers alone and collects everything that does not match, then of a `Checkpoint`, which
copies. So a wrong checkpoint is refused in milliseconds, with every name, before memory is taken.

Each tensor is copied once, from the mapped file into host or device memory, converted on the way; matrices
that a network fuses (QKV, gate and up) are stacked by copying the parts into place. The mapping is dropped
file by file, so the peak is the model and one parameter.

A tensor-parallel rank asks for parts of tensors, and reads no more than these: the mapped pages that they
lie on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.runtime.collective.shard import Span
from engine.runtime.models.quantization import Fp8Scheme
from engine.runtime.setup.model_directory import unreadable_weights
from engine.runtime.setup.model_errors import ModelUnavailable, WeightsMismatch
from engine.runtime.weights.fp8 import Fp8Weight, quantise
from shared.process.files import open_regular
from shared.wire.undecodable import UNDECODABLE

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
NAMES_SHOWN_MAX: Final = 20
COMPARED_ROWS: Final = 4096
"""The number of rows of two compared matrices that are in memory at a time."""
_FLOATS: Final = frozenset({"F32", "F16", "BF16"})
_FP8: Final = "F8_E4M3"
_IGNORED_SUFFIXES: Final = (".rotary_emb.inv_freq",)
"""The suffixes of tables in old checkpoints, which follow from config.json."""
_SCALE_SUFFIXES: Final = ("_scale", "_scale_inv")
"""The suffixes of a scale's name, behind its matrix's name."""
_FP8_IGNORED_SUFFIXES: Final = (".input_scale", ".input_scale_ub", ".output_scale", ".q_scale", ".prob_scale")
"""The suffixes of activations' scales, which are ignored: activations stay in the compute type."""
_KV_SCALE_NAMES: Final = {
    "k": ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale"),
    "v": ("self_attn.v_scale", "self_attn.v_proj.v_scale", "self_attn.v_proj.output_scale"),
}


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of stacked tensors that a rank reads."""

    rows: tuple[Span, ...] | None = None
    """The span of rows of each tensor; None: all rows."""
    columns: Span | None = None
    """The span of columns of every matrix; None: all columns."""

    def row_spans(self, rows: Sequence[int]) -> Sequence[Span]:
        return self.rows or [(0, count) for count in rows]

    def shape(self, rows: Sequence[int], columns: Sequence[int]) -> tuple[int, ...]:
        """The shape of the stacked part, given the tensors' whole sizes."""
        if self.columns is not None:
            columns = [self.columns[1] - self.columns[0]]
        return sum(stop - start for start, stop in self.row_spans(rows)), *columns


ALL: Final = TensorPart()


class WeightSource(Protocol):
    """The source that a network reads its parameters from."""

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        """The parts `part` of the named tensors, [rows[i], *columns] each, one above the other."""
        ...


@runtime_checkable
class Fp8Source(Protocol):
    """A WeightSource that may hold matrices in fp8."""

    def stack_fp8(
        self, names: Sequence[str], rows: Sequence[int], columns: int, part: TensorPart = ALL
    ) -> Fp8Weight | None:
        """The stacked parts in fp8, as they are stored; None where one of the tensors is not in fp8.

        Where no kernel takes the scales' blocks, or the part cuts through one, the weight is rounded again
        with one scale per row.
        """
        ...

    def kv_scales(self, layers: Sequence[int]) -> list[tuple[float, float]] | None:
        """The factors of keys and of values in fp8, for each of these layers; None where the checkpoint has
        none. Raises WeightsMismatch where it has them for some of these only."""
        ...


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def checkpoint_files(model_dir: Path, progress: Callable[[str], None] = lambda _: None) -> Mapping[str, Path]:
    """The file that holds each tensor. Raises ModelUnavailable, WeightsMismatch.

    A file with all weights wins over an index, which may be left over from shards that were deleted;
    `progress` hears of it.
    """
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    try:
        if single.is_file() or not index.is_file():
            if index.is_file():
                progress(
                    f"loading {SINGLE_FILE}: {INDEX_FILE} beside it, and the files it names, are not read"
                )
            with _open(single) as handle:
                return dict.fromkeys(handle.keys(), single)
        named = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        files = {name: model_dir / file for name, file in named.items()}
    except (OSError, *UNDECODABLE, SafetensorError) as error:
        raise ModelUnavailable(
            f"{model_dir} has no readable {SINGLE_FILE} or {INDEX_FILE}, and nothing else is loaded ({error})"
        ) from error
    absent = sorted({path.name for path in files.values() if not path.is_file()})
    if absent:
        raise WeightsMismatch(f"{INDEX_FILE} names files that are not there: {_listed(absent)}")
    if any(path.parent != model_dir for path in files.values()):
        raise WeightsMismatch(f"{INDEX_FILE} names files outside {model_dir}")
    return files


class Inspection:
    """A WeightSource that reads headers only, hands out shapes, and collects all mismatches."""

    def __init__(
        self,
        files: Mapping[str, Path],
        dtype: torch.dtype,
        fp8: Fp8Scheme | None = None,
        foreign: tuple[str, ...] = (),
    ) -> None:
        """`foreign`: what names of tensors begin with that may be there, and are not asked for."""
        self._foreign = foreign
        self._dtype = dtype
        self._fp8 = fp8
        self._asked: set[str] = set()
        self._missing: list[str] = []
        self._misfits: list[str] = []
        self._files = files
        self._headers = _headers(files)

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        for name, count in zip(names, rows, strict=True):
            self._inspect(name, (count, *columns))
        return torch.empty(part.shape(rows, columns), dtype=self._dtype, device="meta")

    def _inspect(self, name: str, expected: tuple[int, ...]) -> None:
        if name in self._asked:  # another part of a tensor that is several to a network
            return
        self._asked.add(name)
        header = self._headers.get(name)
        if header is None or name not in self._files:
            self._missing.append(name)
        elif header.path != self._files[name]:
            self._misfits.append(f"{name} is in {header.path.name}, not in {self._files[name].name}")
        elif header.kind not in _FLOATS and not (header.kind == _FP8 and self._fp8 is not None):
            self._misfits.append(f"{name} is {header.kind}, not a float of 16 or 32 bits")
        elif header.shape != expected:
            self._misfits.append(f"{name} is {list(header.shape)}, not {list(expected)}")
        elif header.kind == _FP8:
            self._inspect_scale(name, expected)

    def _inspect_scale(self, name: str, expected: tuple[int, ...]) -> None:
        assert self._fp8 is not None
        scale = next((name + suffix for suffix in _SCALE_SUFFIXES if name + suffix in self._headers), None)
        if scale is None:
            self._missing.append(name + _SCALE_SUFFIXES[0])
            return
        self._asked.add(scale)
        header = self._headers[scale]
        if header.kind not in _FLOATS:
            self._misfits.append(f"{scale} is {header.kind}, not a float of 16 or 32 bits")
        elif len(expected) != 2 or header.shape not in self._fp8.scale_shapes(*expected):
            self._misfits.append(f"{scale} is {list(header.shape)}, for a matrix of {list(expected)}")

    def verify(self) -> None:
        """Raise WeightsMismatch unless the files hold exactly the tensors that were asked for."""
        ignored: tuple[str, ...] = _IGNORED_SUFFIXES
        if self._fp8 is not None:
            ignored += _FP8_IGNORED_SUFFIXES + _KV_SCALE_NAMES["k"] + _KV_SCALE_NAMES["v"]
        others = (name for name in self._headers.keys() - self._asked if not name.endswith(ignored))
        strangers = sorted(name for name in others if not name.startswith(self._foreign))
        parts = [
            f"{what}: {_listed(names)}"
            for what, names in (
                ("missing tensors", self._missing),
                ("tensors that do not fit", self._misfits),
                ("unexpected tensors", strangers),
            )
            if names
        ]
        if parts:
            raise WeightsMismatch("the weights do not match config.json; " + "; ".join(parts))


class Checkpoint:
    """A WeightSource that copies from the files. It asserts what an Inspection has to verify before."""

    def __init__(
        self,
        files: Mapping[str, Path],
        dtype: torch.dtype,
        fp8: Fp8Scheme | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`device`: the device of the tensors that `stack` returns; None is torch's default."""
        self._files = files
        self._dtype = dtype
        self._device = device
        self._fp8 = fp8
        self._open_path: Path | None = None
        self._open_handle: Any = None  # safetensors has no stub for its handle

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        stacked = torch.empty(part.shape(rows, columns), dtype=self._dtype, device=self._device)
        at = 0
        for name, count, (start, stop) in zip(names, rows, part.row_spans(rows), strict=True):
            wanted = self._read(name, (count, *columns), (start, stop), part.columns)
            if wanted.dtype == torch.float8_e4m3fn:
                wanted = wanted.float() * self._scale(name, (count, *columns), (start, stop), part.columns)
            stacked[at : at + stop - start] = wanted
            at += stop - start
        return stacked

    def are_equal(self, left: str, right: str, rows: int, columns: int) -> bool:
        """True if two matrices [rows, columns] hold the same numbers in the compute type."""
        for start in range(0, rows, COMPARED_ROWS):
            part = TensorPart(rows=((start, min(start + COMPARED_ROWS, rows)),))
            ours, theirs = (self.stack([name], [rows], columns, part=part) for name in (left, right))
            if not torch.equal(ours, theirs):
                return False
        return True

    def stack_fp8(
        self, names: Sequence[str], rows: Sequence[int], columns: int, part: TensorPart = ALL
    ) -> Fp8Weight | None:
        found = []
        for name, count, span in zip(names, rows, part.row_spans(rows), strict=True):
            wanted = self._read(name, (count, columns), span, part.columns)
            if wanted.dtype != torch.float8_e4m3fn:
                return None
            scale = self._scale(name, (count, columns), span, part.columns)
            found.append(self._held(wanted, scale, part.columns))
        groups = {weight.group for weight in found}
        if len(groups) > 1:  # a row's own scale among blocks
            found = [quantise(weight.restored(torch.float32)) for weight in found]
        return Fp8Weight.stacked(found)

    def _held(self, values: Tensor, scale: Tensor, columns: Span | None) -> Fp8Weight:
        """A part in fp8 with its scale, [rows, 1], or [rows, columns] where it differs by block."""
        if scale.shape[1] == 1:
            return Fp8Weight(values, scale[:, 0].contiguous())
        assert self._fp8 is not None
        group = self._fp8.group(0 if columns is None else columns[0])
        if not group:
            return quantise(values.float() * scale)
        return Fp8Weight(values, scale[:, ::group].T.contiguous(), group)

    def kv_scales(self, layers: Sequence[int]) -> list[tuple[float, float]] | None:
        found = []
        for layer in layers:
            at = f"model.layers.{layer}."
            names = [
                next((at + n for n in _KV_SCALE_NAMES[of] if at + n in self._files), None) for of in "kv"
            ]
            found.append([float(self._read(name, None).max()) for name in names if name is not None])
        if not any(found):
            return None
        incomplete = [str(layer) for layer, own in zip(layers, found, strict=True) if len(own) < 2]
        if incomplete:
            raise WeightsMismatch(f"k_scale or v_scale is missing in layers {', '.join(incomplete)}")
        return [(k, v) for k, v in found]

    def _read(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """A tensor as it is stored, or a part of it. `shape`: the whole tensor's shape, which is asserted."""
        source = self._handle(self._files[name]).get_slice(name)
        assert shape is None or tuple(source.get_shape()) == shape, name
        if not source.get_shape():
            scalar: Tensor = self._handle(self._files[name]).get_tensor(name)
            return scalar
        # A slice is a view of the mapped file: only the pages that are copied are read.
        down, across = (slice(None) if span is None else slice(*span) for span in (rows, columns))
        wanted: Tensor = source[down] if columns is None else source[down, across]
        return wanted

    def _scale(self, name: str, shape: tuple[int, ...], rows: Span, columns: Span | None) -> Tensor:
        """The scales of some rows and columns of a matrix: [rows, 1], or [rows, columns] where they differ by
        block."""
        stored = next(name + suffix for suffix in _SCALE_SUFFIXES if name + suffix in self._files)
        scale = self._read(stored, None).float()
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(rows[1] - rows[0], 1)
        if scale.shape[0] == shape[0] and scale.numel() == shape[0]:
            return scale.reshape(-1, 1)[slice(*rows)]
        assert self._fp8 is not None
        assert self._fp8.block is not None
        row = torch.arange(*rows) // self._fp8.block[0]
        column = torch.arange(*(columns or (0, shape[1]))) // self._fp8.block[1]
        return scale[row][:, column]

    def _handle(self, path: Path) -> Any:
        """The open file. Only one is open at a time; layers lie together, so files are seldom reopened."""
        if path != self._open_path:
            self._open_handle = _open(path)
            self._open_path = path
        return self._open_handle


def _open(path: Path) -> Any:
    open_regular(path).close()  # the library would wait for a FIFO's writer
    return safe_open(str(path), framework="pt", device="cpu")


@dataclass(frozen=True, slots=True)
class _Header:
    path: Path
    kind: str
    shape: tuple[int, ...]


def _headers(files: Mapping[str, Path]) -> dict[str, _Header]:
    """The header of every tensor that the files really hold."""
    found: dict[str, _Header] = {}
    for path in sorted(set(files.values())):
        try:
            with _open(path) as handle:
                for name in handle.keys():  # noqa: SIM118  the handle is no mapping
                    view = handle.get_slice(name)
                    found[name] = _Header(path, view.get_dtype(), tuple(view.get_shape()))
        except (OSError, SafetensorError) as error:
            raise WeightsMismatch(unreadable_weights(path, error)) from error
    return found


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
