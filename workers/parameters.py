"""Convert between a model's tensors and the flat float32 vectors that travel.

The training thread calls `FragmentTensors.snapshot` (or `on_device`) and `overwrite`. On a CUDA device they only queue
work; on a CPU they take one memory copy. `Snapshot.numpy` is for the exchange thread, since it may wait for the device.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout, Slot
from diloco.pipeline.messages.spec import SyncSpec, TensorSpec
from diloco.pipeline.messages.wire import MAX_DIMS, MAX_TENSORS, MAX_TEXT_CHARS
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import as_bytes
from diloco.pipeline.settings import SyncSettings
from diloco.workers.averaged import average_rule, averaged_buffers
from diloco.workers.checks.frozen_digests import frozen_digests
from diloco.workers.copies.snapshots import Snapshot, snapshot_of
from diloco.workers.names import named_buffers, named_parameters
from diloco.workers.proposed import Dtype, Proposed, Trained

# Bytes of a float32.
ITEM = 4

Adopted = Callable[[Any, torch.Tensor], object]  # called with an overwritten parameter and its previous values

_DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors to synchronise by name, in `named_parameters` order; tied ones appear once.

    Raises:
        UsageError: there is none, or one is of a kind that cannot travel.
    """
    trained: dict[str, torch.Tensor] = {}
    for name, tensor in named_parameters(model):
        if not tensor.requires_grad:
            continue
        if is_lazy(tensor):
            raise UsageError(
                f"parameter {name} has no shape yet: run the model once on a first batch before creating the learner"
            )
        if not tensor.numel():
            continue
        if tensor.dtype not in _DTYPES:
            raise UsageError(
                f"parameter {name} is {tensor.dtype}; trained tensors may be {', '.join(_DTYPES.values())}: freeze it "
                "(requires_grad_(False)) or convert it"
            )
        if len(name) > MAX_TEXT_CHARS:
            raise UsageError(
                f"parameter {name[:60]}... has a name of {len(name)} characters, but at most "
                f"{MAX_TEXT_CHARS} are allowed"
            )
        if tensor.dim() > MAX_DIMS:
            raise UsageError(f"parameter {name} has {tensor.dim()} dimensions, but at most {MAX_DIMS} are allowed")
        trained[name] = tensor
    if not trained and any(tensor.requires_grad for _, tensor in named_parameters(model)):
        raise UsageError("the model's parameters that require a gradient have no elements: there is nothing to train")
    if not trained:
        raise UsageError(
            "none of the model's parameters requires a gradient, so a learner would have nothing to train: call "
            "requires_grad_(True) on those to train before you create the learner"
        )
    if len(trained) > MAX_TENSORS:
        raise UsageError(f"the model has {len(trained)} trained tensors, but at most {MAX_TENSORS} are allowed")
    return trained


def described(model: nn.Module) -> Proposed:
    """Return what a run must know of a model: trained tensors in `named_parameters` order, and averaged buffers.

    Raises:
        UsageError: see `trained_tensors`.
    """
    trained = trained_tensors(model)
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    of_embeddings = {id(tensor) for tensor in embeddings}
    averaged = averaged_buffers(model, map(local_of, trained.values()))
    return Proposed(
        trained=[
            Trained(name, tuple(tensor.shape), _DTYPES[tensor.dtype], id(tensor) in of_embeddings)
            for name, tensor in trained.items()
        ],
        averaged=[
            TensorSpec(
                name=name, shape=tuple(now.shape), dtype=_DTYPES[now.dtype], rule=average_rule(buffer), fragment=0
            )
            for name, buffer in averaged.items()
            if (now := buffer.tensor) is not None
        ],
        embeddings=[tuple(tensor.shape) for tensor in embeddings],
        frozen=partial(frozen_digests, model),
    )


def tensor_table(model: nn.Module, sync: SyncSettings | SyncSpec) -> tuple[TensorSpec, ...]:
    """Return a model's table of tensors for the spec (`Proposed.tensor_table`).

    Raises:
        UsageError: see `trained_tensors` and `Proposed.whole_tensors`.
    """
    return described(model).tensor_table(sync)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this process holds: a DTensor's shard, which may be empty, else all of it."""
    to_local = getattr(tensor, "to_local", None)  # an isinstance check would import DTensor, which takes seconds
    here: torch.Tensor = tensor if to_local is None else to_local()
    return here


def placed_as(tensor: Any, here: torch.Tensor) -> torch.Tensor:
    """Return the local part `here` of a tensor as a tensor sharded like `tensor`, on the same device."""
    if not hasattr(tensor, "device_mesh"):
        return here
    given = tensor.device_mesh, tensor.placements
    whole: torch.Tensor = type(tensor.data).from_local(
        here.to(tensor.device), *given, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return whole


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules on which `fully_shard` (FSDP2) was called."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if nobody has imported it, no module can be an FSDPModule
    return [one for one in model.modules() if fsdp is not None and isinstance(one, fsdp.FSDPModule)]


def resharding(model: nn.Module) -> Callable[[], None]:
    """Return a function that makes a model hold its shards again, as after an evaluation's forward pass.

    After a forward pass without a backward, the root module given to `fully_shard` keeps whole plain parameters in
    place of its shards, and the next pass uses these, whatever the shards are by then. The function itself sends
    nothing, but the next forward pass has to gather again: so all ranks of a learner must call it after the same steps.
    """
    sharded = fully_sharded(model)

    def reshard() -> None:
        for one in sharded:
            one.reshard()

    return reshard


def _bytes_of(slot: Slot) -> tuple[slice, slice]:
    """Return the bytes of a slot as slices of the fragment's vector and of the whole tensor."""
    flat, whole = (ITEM * slot.start, ITEM * slot.stop), (ITEM * slot.within.start, ITEM * slot.within.stop)
    return slice(*flat), slice(*whole)


def _part(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the part of the whole tensor that lies in a slot."""
    return tensor if slot.tensor.rows is None else tensor[slice(*slot.tensor.rows)]


class FragmentTensors:
    """Copies fragments out of a set of tensors and back into it. All tensors are on one device.

    Of sharded tensors it copies this process's shards, and the layout describes these.

    float32 tensors in host memory are copied as plain bytes. A torch call would release the interpreter's lock, and the
    training thread would then wait behind the exchange thread to get it back.
    """

    def __init__(self, tensors_by_name: Mapping[str, torch.Tensor], layout: Layout) -> None:
        self._layout = layout
        self._tensors = [[tensors_by_name[slot.tensor.name] for slot in f.slots] for f in layout.fragments]
        self._places = [[_bytes_of(slot) for slot in fragment.slots] for fragment in layout.fragments]
        self.device = next((one.device for fragment in self._tensors for one in fragment), torch.device("cpu"))
        self._views: dict[int, tuple[int, memoryview]] = {}
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _plain(self, p: int) -> bool:
        """Return whether a fragment can be copied as plain bytes.

        This is asked at each copy: `model.to(...)`, or an assignment to `.data`, may have changed it.
        """
        here = map(local_of, self._tensors[p])
        return all(t.is_cpu and t.dtype == torch.float32 and t.is_contiguous() for t in here)

    def _bytes(self, tensor: torch.Tensor) -> memoryview:
        """Return the tensor's memory; it is looked up again if the optimizer gave the tensor another storage."""
        here = local_of(tensor)
        address, view = self._views.get(id(tensor), (0, memoryview(b"")))
        if address != here.data_ptr():
            address, view = here.data_ptr(), as_bytes(here.detach().numpy())
            self._views[id(tensor)] = address, view
        return view

    def _check(self, p: int) -> None:
        """Raise if a tensor of the fragment is no longer what it was; a subclass may know."""

    @torch.no_grad()
    def snapshot(self, p: int) -> Snapshot:
        """Copy fragment p; later steps do not change the copy.

        On CUDA the values are first copied on the device, in order with the training stream, so that the next optimizer
        step may overwrite them; the slow copy to pinned memory runs on a side stream.
        """
        self._check(p)
        layout = self._layout.fragments[p]
        if self._plain(p):
            values = pooled(layout.elements, np.float32)
            raw = as_bytes(values)
            for (flat, whole), tensor in zip(self._places[p], self._tensors[p], strict=True):
                raw[flat] = self._bytes(tensor)[whole]
            return Snapshot(torch.from_numpy(values))
        return snapshot_of(self._flat(p), self._side)

    @torch.no_grad()
    def on_device(self, p: int) -> Callable[[], torch.Tensor]:
        """Copy fragment p on its device; return a function that gives the flat vector (elements,).

        Call the function in the stream that uses the vector: it makes that stream wait for the copy.
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
        with torch.inference_mode(False):  # the loop may step in inference mode, but the encoder must write to `flat`
            if self.device.type == "cpu":
                flat = torch.from_numpy(pooled(layout.elements, np.float32))
            else:  # no pool is needed: torch's allocators reuse memory of other devices
                flat = torch.empty(layout.elements, dtype=torch.float32, device=self.device)
        for slot, tensor in zip(layout.slots, self._tensors[p], strict=True):
            part = _part(slot, local_of(tensor))
            flat[slot.start : slot.stop].view(part.shape).copy_(part)
        return flat

    @torch.no_grad()
    def overwrite(self, p: int, flat: npt.NDArray[np.float32] | torch.Tensor) -> None:
        """Write a flat vector (elements,) into fragment p, in place; optimizer moments are not touched.

        flat: an array, or a tensor on this device.
        """
        self._check(p)
        layout = self._layout.fragments[p]
        if isinstance(flat, torch.Tensor):
            if self._side is not None:
                # `flat` was allocated in the encoder's stream: without this its memory could be reused too early.
                flat.record_stream(torch.cuda.current_stream(self.device))
            values = flat
        elif self._plain(p):
            raw = as_bytes(flat)
            for (span, whole), tensor in zip(self._places[p], self._tensors[p], strict=True):
                self._bytes(tensor)[whole] = raw[span]
            return
        else:
            values = torch.from_numpy(flat)
            if self._side is not None:
                values = values.pin_memory().to(self.device, non_blocking=True)
        for slot, tensor in zip(layout.slots, self._tensors[p], strict=True):
            part = _part(slot, local_of(tensor))
            part.copy_(values[slot.start : slot.stop].view(part.shape))


class FragmentParameters(FragmentTensors):
    """Copies fragments out of a model and back into it, for as long as its tensors keep their type and shape.

    A buffer may be another tensor after each step, so buffers are looked up for every copy.
    """

    def __init__(self, model: nn.Module, layout: Layout, adopted: Adopted | None = None) -> None:
        """adopted: called with each parameter that was overwritten, and its previous values."""
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
        """Return access to other parts of the same parameters, now and later. layout: the parts, without buffers."""
        slots = [slot for fragment in self._layout.fragments for slot in fragment.slots]
        tensors = [tensor for fragment in self._tensors for tensor in fragment]
        return FragmentTensors({slot.tensor.name: one for slot, one in zip(slots, tensors, strict=True)}, layout)

    def overwrite(self, p: int, flat: npt.NDArray[np.float32] | torch.Tensor) -> None:
        """Write a fragment, as `FragmentTensors.overwrite` does, so that the next forward pass uses it.

        Resharding makes sure of that for a sharded model. All ranks of a learner call this after the same step.
        """
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
                    f"{what} {slot.tensor.name} was {form[0]} {tuple(form[1])} when the learner joined and is now "
                    f"{tensor.dtype} {tuple(tensor.shape)}: convert the model before the `with` block"
                )
