"""The demo's model, which says English sentences: a small Llama that `training` has trained."""

from pathlib import Path

from shared.ids import ModelName

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""As it was trained: in bfloat16, with its card."""
LICENCE = "WORDNET"
"""The file with the licence of WordNet, a part of the texts. The card names it."""
NAME = ModelName("demo")
