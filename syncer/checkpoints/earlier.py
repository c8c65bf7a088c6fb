"""Checkpoints of formats 1 and 2: one file of the whole model for the values, and one for each of the outer state.

    globals.safetensors                tensor name -> float32
    momentum.safetensors               the same of the outer state, a file for each of its names; a fragment of
                                       which it is all zeros is absent, as is an empty file
    state.json                         `SavedState`
    SHA256SUMS                         digests of all of these; format 1 had none

They are mapped into memory, so that reading a fragment needs no more than a fragment.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import structlog

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.sums import SUMS_FILE, check_sums
from diloco.pipeline.files.tensor_file import Tensor, read_tensors
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.payload.codec import as_bytes, payload_digest
from diloco.pipeline.transfer.global_format import STATE_RULES, OuterState
from diloco.syncer.checkpoints.manifest import GLOBALS, Float32, SavedState
from diloco.syncer.merging.merge import all_finite


class EarlierFiles:
    """Those of one checkpoint."""

    def __init__(self, folder: Path, saved: SavedState) -> None:
        """Raises:
        UsageError: one is missing, is no safetensors file, or names a tensor that the spec does not have.
        """
        self._folder, self._saved = folder, saved
        names = GLOBALS, *STATE_RULES[saved.spec.sync.outer].names
        files = {name: folder / f"{name}.safetensors" for name in names}
        self._found = {name: read_tensors(file) for name, file in files.items() if name == GLOBALS or file.exists()}
        known = {tensor.name for tensor in saved.spec.tensors}
        for name, tensors in self._found.items():
            if strange := sorted(set(tensors) - known):
                raise UsageError(f"{files[name]}: tensor {strange[0]!r} is not in the spec")

    def fragment(self, layout: FragmentLayout) -> tuple[Float32, OuterState]:
        """As `Checkpoint.fragment`."""
        vectors = {
            name: _flatten(self._folder / f"{name}.safetensors", layout, tensors)
            for name, tensors in self._found.items()
            if name == GLOBALS or any(slot.tensor.name in tensors for slot in layout.slots)
        }
        due = self._saved.fragments[layout.id].digest
        if payload_digest(as_bytes(vectors[GLOBALS]), self._saved.spec.sync.chunk_bytes) != due:
            raise UsageError(
                f"{self._folder / GLOBALS}.safetensors: fragment {layout.id} does not have the digest that "
                "state.json says: the file is damaged or of another checkpoint"
            )
        for name, values in vectors.items():
            if not all_finite(values):
                raise UsageError(
                    f"{self._folder / name}.safetensors: fragment {layout.id} has values that are not finite: no run "
                    "can go on from it; take an earlier checkpoint"
                )
        return vectors.pop(GLOBALS), vectors

    def check_sums(self) -> None:
        """Compare all files with their digests; of format 1 there are none, which is told.

        Raises:
            UsageError: naming the file that is damaged or missing.
        """
        if check_sums(self._folder):
            return
        if self._saved.format > 1:
            missing = self._folder / SUMS_FILE
            raise UsageError(f"{missing} is missing: what is here cannot be checked; take another checkpoint")
        checked = "values by their digests; of the outer state only that it is finite"
        structlog.get_logger().warning("checkpoint_without_sums", path=str(self._folder), checked=checked)


def _flatten(file: Path, layout: FragmentLayout, tensors: Mapping[str, Tensor]) -> Float32:
    parts: list[Float32] = []
    for slot in layout.slots:
        tensor = tensors.get(slot.tensor.name)
        if tensor is None:
            raise UsageError(f"{file}: tensor {slot.tensor.name!r} is missing")
        if tensor.dtype != "F32" or tensor.shape != slot.tensor.shape or tensor.nbytes != 4 * slot.tensor.elements:
            raise UsageError(
                f"{file}: tensor {slot.tensor.name!r} is {tensor.dtype} {tensor.shape}, "
                f"the spec says F32 {slot.tensor.shape}"
            )
        parts.append(np.frombuffer(tensor.read(), "<f4"))
    return np.concatenate(parts)  # after the checks: what the spec says of sizes is true then
