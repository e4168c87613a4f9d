"""The class of the one object, by the module that others import it from: Sublet's own, under this name too."""

import sys

from sublet.compat.torch_memory_saver import saver
from sublet.compat.torch_memory_saver.saver import TorchMemorySaver, _TorchMemorySaverImpl, is_xpu

__all__ = ["TorchMemorySaver", "_TorchMemorySaverImpl", "is_xpu"]

# What is set here is set there.
sys.modules[__name__] = saver
