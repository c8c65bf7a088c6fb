"""Between a model's tensors and the flat float32 vectors that travel.

The training thread calls `FragmentTensors.snapshot` (or `on_device`) and `overwrite`; they only queue work on a CUDA
device, and are one memory copy on a CPU. `Snapshot.numpy` is the exchange thread's: it may wait for the device.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout, Slot, balance, fragments_of, level, merge_rule
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec
from diloco.pipeline.messages.wire import MAX_DIMS, MAX_TENSORS, MAX_TEXT_CHARS
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import as_bytes
from diloco.pipeline.settings import SyncSettings, check_outer
from diloco.workers.averaged import average_rule, averaged_buffers
from diloco.workers.copies.snapshots import Snapshot, snapshot_of
from diloco.workers.names import named_buffers, named_parameters

ITEM = 4
"""Bytes of a float32."""

Adopted = Callable[[Any, torch.Tensor], object]
"""Called with a parameter that was overwritten, and its values before."""

_DTYPES: dict[torch.dtype, Literal["float32", "bfloat16", "float16", "float64"]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def _embeddings(model: nn.Module) -> dict[str, bool]:
    """Of every trained tensor by name: whether it is an embedding, by the type of its module."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    return {name: id(tensor) in embeddings for name, tensor in named_parameters(model) if tensor.requires_grad}


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that are synchronised, by name, in `named_parameters` order; what is tied is there once.

    Raises:
        UsageError: there is none, or one is of a kind that cannot travel.
    """
    trained: dict[str, torch.Tensor] = {}
    for name, tensor in named_parameters(model):
        if not tensor.requires_grad:
            continue
        if is_lazy(tensor):
            raise UsageError(f"parameter {name} has no shape yet: run the model once, with a first batch, before")
        if not tensor.numel():
            continue
        if tensor.dtype not in _DTYPES:
            raise UsageError(
                f"parameter {name} is {tensor.dtype}; trained tensors may be {', '.join(_DTYPES.values())}: freeze it "
                "(requires_grad_(False)) or convert it"
            )
        if len(name) > MAX_TEXT_CHARS:
            raise UsageError(f"parameter {name[:60]}... has a name of {len(name)} characters: {MAX_TEXT_CHARS} at most")
        if tensor.dim() > MAX_DIMS:
            raise UsageError(f"parameter {name} has {tensor.dim()} dimensions: {MAX_DIMS} at most")
        trained[name] = tensor
    if not trained:
        raise UsageError("the model has no parameter that requires a gradient: a learner would have nothing to train")
    if len(trained) > MAX_TENSORS:
        raise UsageError(f"the model has {len(trained)} trained tensors: {MAX_TENSORS} at most")
    return trained


def tensor_table(model: nn.Module, sync: SyncSettings | SyncSpec) -> tuple[TensorSpec, ...]:
    """The model's tensors as the spec lists them: trained ones in `named_parameters` order, then averaged buffers.

    What has no room in a fragment is there in parts (`fragments.level`), an untied output head among it.

    Raises:
        UsageError: as `whole_tensors`.
    """
    return level(whole_tensors(model, sync), _heads(model))


def whole_tensors(model: nn.Module, sync: SyncSettings | SyncSpec) -> tuple[TensorSpec, ...]:
    """The same with every tensor in one fragment.

    With an orthogonalised outer step it says which tensors that takes for matrices: those of two dimensions, with
    several rows and columns, that are no embeddings, since a row of an embedding is a vector of its own.

    Raises:
        UsageError: as `trained_tensors`; fewer tensors than fragments, or a step that could never be orthogonalised.
    """
    orthogonal = sync.outer == "halley"
    check_outer(sync)
    trained = trained_tensors(model)
    embeddings = _embeddings(model)
    averaged = averaged_buffers(model, map(local_of, trained.values()))
    sizes = ((name, tensor.numel()) for name, tensor in trained.items())
    fragment = balance(sizes, sync.fragments, averaged)
    parameters = tuple(
        TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=_DTYPES[tensor.dtype],
            rule=merge_rule(sync.merge, embeddings[name], tensor.dim()),
            fragment=fragment[name],
            matrix=orthogonal and _is_matrix(tensor) and not embeddings[name],
        )
        for name, tensor in trained.items()
    )
    buffers = tuple(
        TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=_DTYPES[tensor.dtype],
            rule=average_rule(buffer),
            fragment=fragment[name],
        )
        for name, buffer in averaged.items()
        if (tensor := buffer.tensor) is not None
    )
    return parameters + buffers


def hidden_matrices(model: nn.Module) -> list[torch.Tensor]:
    """The trained matrices that are no embeddings and no output head, whose rows or columns stand for single tokens."""
    embeddings, heads = _embeddings(model), _heads(model)
    trained = trained_tensors(model).items()
    return [tensor for name, tensor in trained if _is_matrix(tensor) and not embeddings[name] and name not in heads]


def _is_matrix(tensor: torch.Tensor) -> bool:
    """With several rows and columns: of one alone there is nothing to orthogonalise."""
    return tensor.dim() == 2 and min(tensor.shape) > 1


def _heads(model: nn.Module) -> frozenset[str]:
    """Names of the output heads: of the shape of the largest embedding, of which nothing else in a model is."""
    shapes = [module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    if not shapes:
        return frozenset()
    largest = max(shapes, key=lambda shape: shape.numel())
    return frozenset(name for name, tensor in trained_tensors(model).items() if tensor.shape == largest)


def fitting_fragments(model: nn.Module, wanted: int) -> int:
    """The number of fragments of a model for which nobody asked for a number (`fragments_of`).

    Raises:
        UsageError: as `trained_tensors`.
    """
    trained = trained_tensors(model)
    return fragments_of(wanted, len(trained), len(averaged_buffers(model, map(local_of, trained.values()))))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: of a DTensor its shard, which may be empty; else all of it."""
    to_local = getattr(tensor, "to_local", None)  # to ask for the class would be to import it, which takes seconds
    here: torch.Tensor = tensor if to_local is None else to_local()
    return here


def placed_as(tensor: Any, here: torch.Tensor) -> torch.Tensor:
    """What this process holds of another tensor that is sharded like `tensor`, as such a one; on its device."""
    if not hasattr(tensor, "device_mesh"):
        return here
    given = tensor.device_mesh, tensor.placements
    whole: torch.Tensor = type(tensor.data).from_local(
        here.to(tensor.device), *given, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return whole


def resharding(model: nn.Module) -> Callable[[], None]:
    """What has a model hold its shards, also after a forward pass that no backward follows, such as an evaluation's.

    Of the root of what was given to `fully_shard` that leaves plain whole parameters in their place, from which the
    next pass goes on, whatever the shards are by then. Nothing is sent here, but in that pass: so all ranks of a
    learner call it after the same steps.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody imported it no module is of it
    sharded = [one for one in model.modules() if fsdp is not None and isinstance(one, fsdp.FSDPModule)]

    def reshard() -> None:
        for one in sharded:
            one.reshard()

    return reshard


class _Bytes(NamedTuple):
    """Where a slot's bytes lie."""

    flat: slice
    """In the fragment's vector."""
    tensor: slice
    """In the whole tensor."""

    @classmethod
    def of(cls, slot: Slot) -> "_Bytes":
        within = slot.within
        return cls(slice(ITEM * slot.start, ITEM * slot.stop), slice(ITEM * within.start, ITEM * within.stop))


def _part(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """What lies in a slot, of the whole tensor: a view."""
    return tensor if slot.tensor.rows is None else tensor[slice(*slot.tensor.rows)]


class FragmentTensors:
    """Copies fragments out of a set of tensors and into it. All of them live on one device.

    Of sharded tensors it copies what this process holds, which the layout is of.

    float32 tensors in host memory are copied as plain bytes: a torch call lets go of the interpreter's lock, and
    the training thread would then wait in line behind the exchange thread to get it back.
    """

    def __init__(self, tensors_by_name: Mapping[str, torch.Tensor], layout: Layout) -> None:
        self._layout = layout
        self._tensors = [[tensors_by_name[slot.tensor.name] for slot in f.slots] for f in layout.fragments]
        self._places = [[_Bytes.of(slot) for slot in fragment.slots] for fragment in layout.fragments]
        self.device = next((one.device for fragment in self._tensors for one in fragment), torch.device("cpu"))
        self._views: dict[int, tuple[int, memoryview]] = {}
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _plain(self, p: int) -> bool:
        """Asked at each copy: `model.to(...)`, or another `.data`, may have changed it."""
        here = map(local_of, self._tensors[p])
        return all(t.is_cpu and t.dtype == torch.float32 and t.is_contiguous() for t in here)

    def _bytes(self, tensor: torch.Tensor) -> memoryview:
        """The tensor's memory; looked up anew if the optimizer gave it another storage."""
        here = local_of(tensor)
        address, view = self._views.get(id(tensor), (0, memoryview(b"")))
        if address != here.data_ptr():
            address, view = here.data_ptr(), as_bytes(here.detach().numpy())
            self._views[id(tensor)] = address, view
        return view

    def _check(self, p: int) -> None:
        """Refuse to copy what is no longer there."""

    @torch.no_grad()
    def snapshot(self, p: int) -> Snapshot:
        """Fragment p as it is now; later steps do not change it.

        On CUDA the values are first copied on the device, in order with the training stream, so that the next
        optimizer step may overwrite them; the slow copy to pinned memory runs on a side stream.
        """
        self._check(p)
        layout = self._layout.fragments[p]
        if self._plain(p):
            values = pooled(layout.elements, np.float32)
            raw = as_bytes(values)
            for place, tensor in zip(self._places[p], self._tensors[p], strict=True):
                raw[place.flat] = self._bytes(tensor)[place.tensor]
            return Snapshot(torch.from_numpy(values))
        return snapshot_of(self._flat(p), self._side)

    @torch.no_grad()
    def on_device(self, p: int) -> Callable[[], torch.Tensor]:
        """Fragment p as it is now, as a flat vector (elements,) on its device.

        To be called in the stream in which it is used: there it is as if it had been copied before.
        """
        self._check(p)
        flat = self._flat(p)
        if self._side is None:
            return lambda: flat
        copied = torch.cuda.current_stream(self.device).record_event()

        def values() -> torch.Tensor:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            flat.record_stream(stream)
            return flat

        return values

    def _flat(self, p: int) -> torch.Tensor:
        layout = self._layout.fragments[p]
        with torch.inference_mode(False):  # the loop may step in that mode; who encodes writes to it outside of it
            if self.device.type == "cpu":
                flat = torch.from_numpy(pooled(layout.elements, np.float32))
            else:  # torch uses memory of other devices again by itself
                flat = torch.empty(layout.elements, dtype=torch.float32, device=self.device)
        for slot, tensor in zip(layout.slots, self._tensors[p], strict=True):
            part = _part(slot, local_of(tensor))
            flat[slot.start : slot.stop].view(part.shape).copy_(part)
        return flat

    @torch.no_grad()
    def overwrite(self, p: int, flat: npt.NDArray[np.float32] | torch.Tensor) -> None:
        """Put a flat vector (elements,) into fragment p, in place; optimizer moments stay as they are.

        flat: an array, or a tensor on this device.
        """
        self._check(p)
        layout = self._layout.fragments[p]
        if isinstance(flat, torch.Tensor):
            if self._side is not None:
                flat.record_stream(torch.cuda.current_stream(self.device))  # it is of another stream
            values = flat
        elif self._plain(p):
            raw = as_bytes(flat)
            for place, tensor in zip(self._places[p], self._tensors[p], strict=True):
                self._bytes(tensor)[place.tensor] = raw[place.flat]
            return
        else:
            values = torch.from_numpy(flat)
            if self._side is not None:
                values = values.pin_memory().to(self.device, non_blocking=True)
        for slot, tensor in zip(layout.slots, self._tensors[p], strict=True):
            part = _part(slot, local_of(tensor))
            part.copy_(values[slot.start : slot.stop].view(part.shape))


class FragmentParameters(FragmentTensors):
    """Copies fragments out of a model and into it, for as long as its tensors are what they were.

    A buffer may be another tensor after each step, so it is looked up whenever it is copied.
    """

    def __init__(self, model: nn.Module, layout: Layout, adopted: Adopted | None = None) -> None:
        """adopted: called with each parameter that was overwritten, and its values before."""
        names = {slot.tensor.name for fragment in layout.fragments for slot in fragment.slots}
        held = {buffer.name: buffer for buffer in named_buffers(model) if buffer.name in names}
        tensors: dict[str, torch.Tensor] = dict(named_parameters(model))
        tensors |= {name: tensor for name, buffer in held.items() if (tensor := buffer.tensor) is not None}
        super().__init__(tensors, layout)
        self._forms = [[(tensor.dtype, tensor.shape) for tensor in fragment] for fragment in self._tensors]
        self._held = [[held.get(slot.tensor.name) for slot in f.slots] for f in layout.fragments]
        self._averaged = [any(fragment) for fragment in self._held]
        self._reshard, self._adopted = resharding(model), adopted

    def some(self, layout: Layout) -> FragmentTensors:
        """Other parts of the same parameters, as they are now and later. layout: which; no buffers."""
        slots = [slot for fragment in self._layout.fragments for slot in fragment.slots]
        tensors = [tensor for fragment in self._tensors for tensor in fragment]
        return FragmentTensors({slot.tensor.name: one for slot, one in zip(slots, tensors, strict=True)}, layout)

    def overwrite(self, p: int, flat: npt.NDArray[np.float32] | torch.Tensor) -> None:
        """As `FragmentTensors`; the next forward pass takes it. Ranks of a learner adopt at the same step."""
        self._reshard()
        if self._adopted is None:
            super().overwrite(p, flat)
            return
        parameters = [one for one, buffer in zip(self._tensors[p], self._held[p], strict=True) if buffer is None]
        with torch.no_grad():
            before = [one.clone() for one in parameters]
            super().overwrite(p, flat)
            for one, was in zip(parameters, before, strict=True):
                self._adopted(one, was)

    def _look_up(self, p: int) -> None:
        for at, (buffer, was) in enumerate(zip(self._held[p], self._tensors[p], strict=True)):
            now = was if buffer is None else buffer.tensor
            if now is None:
                raise UsageError(f"buffer {self._layout.fragments[p].slots[at].tensor.name} is no longer in the model")
            if now is not was:
                self._views.pop(id(was), None)
                self._tensors[p][at] = now

    def _check(self, p: int) -> None:
        if self._averaged[p]:
            self._look_up(p)
        for slot, tensor, form in zip(self._layout.fragments[p].slots, self._tensors[p], self._forms[p], strict=True):
            if (tensor.dtype, tensor.shape) != form:
                what = "buffer" if self._averaged[p] else "parameter"
                raise UsageError(
                    f"{what} {slot.tensor.name} was {form[0]} {tuple(form[1])} on joining and is {tensor.dtype} "
                    f"{tuple(tensor.shape)} now: convert the model before `with`"
                )
