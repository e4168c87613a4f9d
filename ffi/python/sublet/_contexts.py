"""Context managers that leave nothing behind when a signal comes while they are entered."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    context = contextlib.contextmanager
else:

    class _Context(contextlib._GeneratorContextManager):
        def __enter__(self) -> Any:
            try:
                return super().__enter__()
            except BaseException:
                # A signal can come between the generator's ``yield`` and the block: then nobody else ends it.
                self.gen.close()
                raise

    def context(function: Callable[..., Any]) -> Callable[..., Any]:
        """Like ``contextlib.contextmanager``, except that the generator also ends if ``__enter__`` raises."""

        @functools.wraps(function)
        def made(*args: Any, **kwargs: Any) -> _Context:
            return _Context(function, args, kwargs)

        return made
