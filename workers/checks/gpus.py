"""How many GPUs there are. Without a driver torch is not loaded to know it."""

from pathlib import Path

DRIVERS = "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"
"""Devices of NVIDIA's driver, of its one under WSL, and of AMD's."""


def count_gpus() -> int:
    """Devices that torch calls cuda, as this process sees them."""
    if not any(Path(driver).exists() for driver in DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()
