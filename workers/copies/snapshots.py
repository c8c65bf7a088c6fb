"""Copies of a tensor's values at one moment, made while training continues."""

import numpy as np
import numpy.typing as npt
import torch


class Snapshot:
    """A tensor's values at one moment, perhaps still on their way to host memory."""

    def __init__(self, host: torch.Tensor, copied: torch.cuda.Event | None = None) -> None:
        self._host = host
        self._copied = copied

    def ready(self) -> bool:
        """Return True if the other methods would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def tensor(self) -> torch.Tensor:
        """Return the host tensor; waits for the device, so never call it in the training thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def number(self) -> float:
        """Return the only element, waiting as `tensor` does."""
        if self._copied is not None:
            self._host, self._copied = self.tensor().clone(), None  # frees the pinned memory for a later copy
        return float(self._host)

    def numpy(self) -> npt.NDArray[np.float32]:
        """Return a fragment's flat vector (elements,), waiting as `tensor` does."""
        array: npt.NDArray[np.float32] = self.tensor().numpy()
        return array


def snapshot_of(values: torch.Tensor, side: torch.cuda.Stream | None = None) -> Snapshot:
    """Copy a tensor's current values, in order with the training stream; on CUDA, only queue the copy.

    Args:
        values: must not be written to again. On CUDA without `side` they may, in the training stream.
        side: a stream of its device, for large tensors: the training stream does not wait for the slow copy in it.
    """
    if not values.is_cuda:
        return Snapshot(values.cpu())
    host = torch.empty_like(values, device="cpu", pin_memory=True)  # torch's allocator reuses pinned memory
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(values.device))
    with torch.cuda.stream(side):
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.current_stream(values.device).record_event()
    if side is not None:
        values.record_stream(side)  # keeps the allocator from reusing the memory before the copy is over
    return Snapshot(host, copied)
