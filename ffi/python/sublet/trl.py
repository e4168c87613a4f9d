"""TRL, and every ``Trainer`` of transformers: the trainer's memory leaves while others need the GPU.

:class:`TakeTurns` is a ``TrainerCallback``. Importing this module imports neither torch nor transformers.

>>> from sublet.trl import TakeTurns
>>> turns = TakeTurns("infer")
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Callable, TypeVar, Union, cast

from sublet._contexts import context
from sublet._errors import UsageError
from sublet._library import attached
from sublet._paging_refusals import moved_by
from sublet._pausing import pause_noting, resume
from sublet._regions import checked_tag
from sublet._tenants import Tenant
from sublet.compat._moving import Moved, states

__all__ = ["TakeTurns"]

#: The events that are acted upon.
EVENTS = (
    "on_train_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_save",
    "on_train_end",
)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class TakeTurns:
    """Has a trainer give its optimizer's memory up between steps, and all its memory while it generates.

    As a callback it keeps the optimizer's state away from the end of one optimizer step to the next: while the
    trainer generates, and during forward and backward passes. With a generator in another tenant,
    :meth:`away` and :meth:`rollout` swap the two tenants while the trainer waits for completions.

    Args:
        generator: the tenant that generates; ``None`` when the trainer's own process does.
        optimizer: keep the optimizer's state away between its steps. Not for DeepSpeed, whose steps are
            not the trainer's.
        tag: the tag of the optimizer's state.

    Every rank has one. An object of this class is a ``transformers.TrainerCallback`` where transformers is
    installed. It does nothing but warn in a process that is not under Sublet.

    >>> trainer = GRPOTrainer(..., callbacks=[turns], rollout_func=turns.rollout(generate))
    """

    def __init__(
        self,
        generator: Union[Tenant, str, None] = None,
        *,
        optimizer: bool = True,
        tag: str = "trl/optimizer",
    ) -> None:
        self._generator = Tenant(generator) if isinstance(generator, str) else generator
        self._moves_optimizer = optimizer
        self._moved, self._home = Moved(checked_tag(tag)), _Home()
        self._group: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> TakeTurns:
        return cast(TakeTurns, object.__new__(_callback_of(cls)))

    # ------------------------------------------------------------ all memory

    @context
    def away(self) -> Iterator[None]:
        """Inside, the trainer's tenant is paused and the generator's runs; afterwards the reverse.

        All ranks enter and leave it together. Inside they use no GPU: a thread that does stops until the
        end. An error inside is raised when the trainer runs again.

        Raises:
            UsageError: no generator is named, or there is no such tenant.
            NotAttachedError: this process is not under Sublet.
            OutOfDeviceMemory, RefusedError, RetryError: on entry, the trainer runs on. On leaving, it may
                still be paused: ``sublet.is_paused()`` says so, and ``sublet.resume(together=True)`` can be
                called again.
        """
        generator = self._generator
        if generator is None:
            raise UsageError("TakeTurns: no generator is named: TakeTurns('infer')")
        # Where it is not there, that is said before anything is paused.
        generator.stats()
        ranks = self._ranks()
        done: list[str] = []
        try:
            pause_noting(done, together=True)
            try:
                # Whichever rank is first does it for all; for the others it is done already.
                generator.resume()
                yield
            finally:
                # One that is done, or has failed, must not pause what others still wait for.
                ranks()
                generator.pause()
        finally:
            if done:
                resume(together=True)

    def rollout(self, function: _Function) -> _Function:
        """The function, run inside :meth:`away`: for ``GRPOTrainer(rollout_func=...)``."""

        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Any:
            with self.away():
                return function(*args, **kwargs)

        return cast(_Function, generate)

    def _ranks(self) -> Callable[[], None]:
        """Returns a function that synchronizes all ranks without a device. The first call is while the trainer runs."""
        torch: Any = sys.modules.get("torch")
        distributed: Any = getattr(torch, "distributed", None)
        is_alone = (
            distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
            or distributed.get_world_size() == 1
        )
        if is_alone:
            return lambda: None
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        return functools.partial(distributed.barrier, group=self._group)

    # ------------------------------------------------------------ the optimizer's state

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks the optimizer."""
        if not self._moves_optimizer:
            return
        if not attached():
            warnings.warn(
                "TakeTurns: this process is not under Sublet, and its optimizer's state stays: start it "
                "with `sublet run --tenant NAME -- ...`",
                RuntimeWarning,
                stacklevel=2,
            )
            self._moves_optimizer = False
            return
        optimizer = _unwrapped(kwargs.get("optimizer"))
        moved_by(optimizer, "sublet.trl.TakeTurns")
        for register in ("register_state_dict_pre_hook", "register_load_state_dict_pre_hook"):
            # Code that reads or writes it, as a checkpoint does, finds it on its device.
            getattr(optimizer, register)(lambda *_: self._moved.stay())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The state returns."""
        if self._moves_optimizer:
            optimizer = _unwrapped(kwargs.get("optimizer"))
            self._moved.load(functools.partial(self._home.back, optimizer), _tensors(optimizer))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The state leaves."""
        self._leave(**kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The state leaves, after a checkpoint has read it."""
        self._leave(**kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The state returns, for use after the training."""
        self.on_pre_optimizer_step(args, state, control, **kwargs)

    def _leave(self, **kwargs: Any) -> None:
        if self._moves_optimizer:
            optimizer = _unwrapped(kwargs.get("optimizer"))
            if optimizer.state:
                self._moved.offload(functools.partial(self._home.leave, optimizer), _tensors(optimizer))


class _Home:
    """Moves an optimizer's state to the host and back, for the first time and when its tensors are new."""

    def __init__(self) -> None:
        self._devices: dict[tuple[int, str], Any] = {}

    def leave(self, optimizer: Any) -> None:
        """To host memory."""
        for index, of_parameter in enumerate(optimizer.state.values()):
            for name, value in of_parameter.items():
                if getattr(value, "is_cuda", False):
                    self._devices[index, name] = value.device
                    of_parameter[name] = value.to("cpu")

    def back(self, optimizer: Any) -> None:
        """To the devices where it was."""
        for index, of_parameter in enumerate(optimizer.state.values()):
            for name, value in of_parameter.items():
                device = self._devices.pop((index, name), None)
                if device is not None:
                    of_parameter[name] = value.to(device)


def _tensors(optimizer: Any) -> Callable[[], Iterator[Any]]:
    return lambda: states(optimizer.state)


def _unwrapped(optimizer: Any) -> Any:
    """torch's own optimizer, of which accelerate hands out a wrapper."""
    seen = []
    while optimizer is not None:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        if "deepspeed" in kind.lower():
            raise UsageError(
                f"TakeTurns: the steps of {kind} are DeepSpeed's own: use TakeTurns(optimizer=False)"
            )
        seen.append(optimizer)
        optimizer = getattr(optimizer, "optimizer", None)
    if not seen:
        raise UsageError("TakeTurns: the trainer has no optimizer: use TakeTurns(optimizer=False)")
    return seen[-1]


_classes: dict[type, type] = {}


def _callback_of(cls: type) -> type:
    """The class with ``TrainerCallback`` behind it; transformers is imported here."""
    if cls not in _classes:
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise UsageError(f"TakeTurns: transformers cannot be imported: {error}") from error
        base = transformers.TrainerCallback
        missing = [event for event in EVENTS if not hasattr(base, event)]
        if missing:
            raise UsageError(
                f"TakeTurns: transformers {transformers.__version__} has no "
                f"TrainerCallback.{missing[0]}, without which the optimizer's state would be away in its "
                "step; frameworks.md in the folder of `sublet docs` names what was read"
            )
        _classes[cls] = type(cls.__name__, (cls, base), {"__module__": __name__})
    return _classes[cls]
