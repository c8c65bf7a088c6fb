"""Count the GPUs. Torch is loaded for it only if there is a driver."""

from pathlib import Path

# Device files of NVIDIA's driver, of its WSL driver, and of AMD's.
DRIVERS = "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"


def count_gpus() -> int:
    """Return the number of devices that torch calls cuda, as this process sees them."""
    if not any(Path(driver).exists() for driver in DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()
