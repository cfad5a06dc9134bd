"""Tests of what only a GPU can show. They are skipped, visibly, on a machine without one."""

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here: what runs on a GPU is not tested"
)
