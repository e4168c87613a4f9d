"""The two tenants with PyTorch: TRL's trainer as it is published, and a generator of transformers' models."""
