"""Sublet: GPU jobs take turns on devices.

Pausing gives device memory back to the driver; resuming brings it back to the same addresses with the
same contents. Start a program with ``sublet run --tenant NAME -- python train.py`` (or
``python -m sublet run ...``), or call :func:`attach` before CUDA is used.

Importing this package imports no other, needs no GPU and starts nothing.
"""

from sublet._budgets import budget
from sublet._errors import (
    Error,
    LostError,
    NotAttachedError,
    OutOfDeviceMemory,
    OutOfHostMemory,
    RefusedError,
    RetryError,
    UsageError,
)
from sublet._library import (
    AttachReport,
    attach,
    attached,
    configure_subprocess,
    library_path,
    nccl_library_path,
)
from sublet._memory import host_copy, set_file_dir
from sublet._native import __version__ as __version__
from sublet._paging import paged
from sublet._planning import Plan, plan, report, set_frames
from sublet._pausing import is_paused, pause, paused, resume, stats
from sublet._regions import Region, region
from sublet._report import Report, SwapReport
from sublet._saved import saved
from sublet._tenants import Tenant, swap, tenants
from sublet._turns import turn

__all__ = [
    "AttachReport",
    "Error",
    "LostError",
    "NotAttachedError",
    "OutOfDeviceMemory",
    "OutOfHostMemory",
    "Plan",
    "RefusedError",
    "Region",
    "Report",
    "RetryError",
    "SwapReport",
    "Tenant",
    "UsageError",
    "attach",
    "attached",
    "budget",
    "configure_subprocess",
    "host_copy",
    "is_paused",
    "library_path",
    "nccl_library_path",
    "paged",
    "pause",
    "paused",
    "plan",
    "region",
    "report",
    "resume",
    "saved",
    "set_file_dir",
    "set_frames",
    "stats",
    "swap",
    "tenants",
    "turn",
]

for _name in __all__:
    # Users see one name for each thing: the package's.
    globals()[_name].__module__ = __name__
del _name
