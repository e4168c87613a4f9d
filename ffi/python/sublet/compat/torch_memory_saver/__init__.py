"""The interface of ``torch_memory_saver``, answered by Sublet.

>>> from sublet.compat.torch_memory_saver import torch_memory_saver as saver
>>> with saver.region("kv_cache"):
...     cache = allocate(4 << 20)
>>> saver.pause("kv_cache")
>>> saver.resume("kv_cache")
"""

from sublet.compat.torch_memory_saver.preload import configure_subprocess
from sublet.compat.torch_memory_saver.saver import TorchMemorySaver

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

#: The one object of a process.
torch_memory_saver = TorchMemorySaver()
