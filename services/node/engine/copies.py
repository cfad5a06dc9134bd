"""Copies between host and GPU through page-locked memory, so that a copy to the GPU is not waited
for."""

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to the device. Everything that its stream does from now on sees the values."""
    if values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Copies to the host and waits until the copy, and all work begun on the device's stream, is
    done."""
    if values.device.type == "cpu":
        return values
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return there
