"""Write a folder of torch.distributed.checkpoint from one process."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save


def write_dcp(tensors: Mapping[str, npt.NDArray[np.float32]], folder: Path) -> None:
    """Write arrays as a state dict of tensors with these names.

    Raises:
        OSError: the folder cannot be written.
    """
    try:
        with warnings.catch_warnings(category=UserWarning, action="ignore"):  # arrays are read-only; one process saves
            state = {name: torch.from_numpy(values) for name, values in tensors.items()}
            save(state, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:  # not even an Exception
        (failure, _), *_ = error.failures.values()
        raise OSError(str(failure)) from error
