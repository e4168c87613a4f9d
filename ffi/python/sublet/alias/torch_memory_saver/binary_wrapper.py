"""The C functions, by the module that others import them from."""

from sublet.compat.torch_memory_saver.functions import BinaryWrapper

__all__ = ["BinaryWrapper"]
