"""Write a folder of torch.distributed.checkpoint from one process."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.state_dict_saver import save


def write_dcp(tensors: Mapping[str, npt.NDArray[np.float32]], folder: Path) -> None:
    """Write arrays as a state dict of tensors with these names.

    Raises:
        OSError: the folder cannot be written.
    """
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # of arrays that are read-only; one process
        save({name: torch.from_numpy(values) for name, values in tensors.items()}, checkpoint_id=folder, no_dist=True)
