"""Runs a model's blocks with torch. Imported before torch multiplies anything in this process."""

import os

# MKL's products otherwise depend, on some CPUs, on how many rows there are; see attention.py.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
