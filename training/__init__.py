"""Trains a very small Llama that writes English (`python -m training`): texts, trainer and card."""
