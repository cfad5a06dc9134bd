"""`lambdascale bench chaos`: a real cluster under load; its processes die, hang and are cut off."""
