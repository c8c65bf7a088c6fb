"""A tensor's values at one moment, on their way to host memory while training goes on."""

import numpy as np
import numpy.typing as npt
import torch


class Snapshot:
    """A tensor's values at one moment, perhaps still on their way to host memory."""

    def __init__(self, host: torch.Tensor, copied: torch.cuda.Event | None = None) -> None:
        self._host = host
        self._copied = copied

    def ready(self) -> bool:
        """True if `tensor` would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def tensor(self) -> torch.Tensor:
        """Waits for the device, so never call it in the training thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def numpy(self) -> npt.NDArray[np.float32]:
        """As `tensor`, of one that is a fragment's: the flat vector (elements,)."""
        array: npt.NDArray[np.float32] = self.tensor().numpy()
        return array


def snapshot_of(values: torch.Tensor, side: torch.cuda.Stream | None = None) -> Snapshot:
    """A tensor as it is now, in order with the training stream. On CUDA it only queues the copy; else it waits.

    Args:
        values: nobody writes to it again. On CUDA without `side` anybody may, in the training stream.
        side: a stream of its device, for what is large: the training stream goes on beside its slow copy.
    """
    if not values.is_cuda:
        return Snapshot(values.cpu())
    host = torch.empty_like(values, device="cpu", pin_memory=True)  # torch uses pinned memory again by itself
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(values.device))
    with torch.cuda.stream(side):
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.current_stream(values.device).record_event()
    if side is not None:
        values.record_stream(side)  # the allocator must not hand it out before the copy is over
    return Snapshot(host, copied)
