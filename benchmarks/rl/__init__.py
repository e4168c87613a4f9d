"""GRPO with trainer and generator as two tenants that take turns on the same GPUs; `run.py` says how to start it."""
