"""`lambdascale demo`: one load spike, served while the weights move, from start to end."""
