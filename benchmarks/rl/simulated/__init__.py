"""The two tenants without PyTorch: memory of the simulated driver whose bytes stand for weights."""
