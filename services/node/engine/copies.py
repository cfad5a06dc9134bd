"""Between the host and a GPU by page-locked memory: what is copied to it is not waited for."""

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What the device's stream does from now on finds them there."""
    if values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Once they are there; that is, once all is done that was begun on the device's stream."""
    if values.device.type == "cpu":
        return values
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return there
