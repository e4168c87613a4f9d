"""Work at the end of `import torch` in an environment that has this package: PyTorch calls what packages offer for
``torch.backends``. A program under ``sublet run`` needs no line of its own for it."""

from __future__ import annotations

import sys


def torch_was_imported() -> None:
    """Installs what ``SUBLET_COMPAT`` names, and has pauses of this process, if it is one of a tenant, leave out what PyTorch has
    cached. Outside of a tenant it does nothing. Uses no device, and raises nothing: ``import torch`` would fail with it."""
    try:
        from sublet import compat
        from sublet._library import answer_pauses_of_a_tenant

        compat.install_if_asked()
        answer_pauses_of_a_tenant()
    except Exception as error:
        # No warning: where those are errors it would reach `import torch`.
        print(f"sublet: is not told of this PyTorch: {error}", file=sys.stderr)
