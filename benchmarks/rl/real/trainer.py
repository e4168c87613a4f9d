"""TRL's GRPOTrainer as it is published; completions come by `rollout_func` from the other tenant."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rl.links import Worker
from rl.real import model as models  # sets variables that PyTorch reads when it is imported
from rl.real.weights import Layout, Lender

import torch  # isort: skip
import torch.distributed as dist
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


#: Where it is not 1e-4.
_LEARNING_RATES = {"tiny": 2e-3}


class Aborted(Exception):
    """The generator is gone."""


class Rollouts:
    """What TRL calls for completions, and what the conductor asks of the trainer meanwhile."""

    def __init__(self, worker: Worker, device: torch.device) -> None:
        self._worker, self._device = worker, device
        self._trainer: Any = None
        self._lender: Any = None
        self._store: Any = None
        self._rejoined = 0
        #: Tensors whose storage is empty, and what it held.
        self._away: list[tuple[torch.Tensor, torch.UntypedStorage]] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self._trainer = trainer
        model = self.model()
        self._lender = Lender(Layout(model))
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        fingerprint = models.fingerprint(model)
        request = {"step": trainer.state.global_step, "ids": ids, "fingerprint": fingerprint, "parts": self._parts()}
        self._worker.say(op="rollout", **request, **last_figures(trainer))
        answer = self._worker.serve(self._operations(), until="completions")["args"]
        if answer.get("failed"):
            self._worker.say(op="done", loss=None, reward=None, fingerprint=fingerprint, intact=fingerprint == models.fingerprint(model))
            self._worker.serve({}, until="exit")
            raise Aborted
        completions = answer["groups"][int(os.environ.get("RANK", "0"))]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[0.0] * len(one) for one in completions]}

    def model(self) -> Any:
        """The policy itself."""
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    def _parts(self) -> dict[str, int]:
        return {"weights": models.nbytes(self.model().parameters()), "optimizer": models.nbytes(self._states())}

    def _states(self) -> list[torch.Tensor]:
        states = self._trainer.optimizer.state.values() if self._trainer.optimizer is not None else ()
        return [value for state in states for value in state.values() if torch.is_tensor(value) and value.dim()]

    def _operations(self) -> dict[str, Any]:
        return {
            "lend": self._lender.lend, "lent": self._lender.lent, "write": self._write, "leave": self._leave,
            "arrive": self._arrive, "leave_groups": self._leave_groups, "join_groups": self._join_groups, "trim": self._settle,
        }  # fmt: skip

    def _write(self, path: str, away: bool) -> int:
        if away:
            import sublet

            return int(self._lender.write(path, sublet.host_copy))
        kept = {}
        for tensor, held in self._away:
            copy = torch.empty(0, dtype=tensor.dtype)
            kept[id(tensor)] = copy.set_(held, tensor.storage_offset(), tensor.size(), tensor.stride())
        return int(self._lender.write(path, lambda parameter: kept[id(parameter)] if kept else parameter.detach().cpu()))

    def _leave(self) -> int:
        """By hand, as frameworks do it: storages are emptied and filled again, and tensors stay what they are. A model that is moved
        by `to` loses the hooks by which DistributedDataParallel adds up gradients."""
        nbytes = 0
        for tensor in [*self.model().parameters(), *self.model().buffers(), *self._states()]:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._away.append((tensor, storage.clone() if storage.device.type == "cpu" else storage.cpu()))
                nbytes += storage.nbytes()
                storage.resize_(0)
        self._settle()
        return nbytes

    def _arrive(self) -> None:
        for tensor, held in self._away:
            storage = tensor.untyped_storage()
            storage.resize_(held.nbytes())
            storage.copy_(held)
        self._away.clear()
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _leave_groups(self) -> None:
        if dist.is_initialized():
            self._store = dist.distributed_c10d._get_default_store()
            self._backend = dist.get_backend()
            dist.destroy_process_group()

    def _join_groups(self) -> None:
        if self._store is None:
            return
        self._rejoined += 1
        # The keys of the groups before are still in the store.
        store = dist.PrefixStore(f"again-{self._rejoined}", self._store)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(self._backend, store=store, rank=rank, world_size=world)
        wrapped = self._trainer.model_wrapped
        if hasattr(wrapped, "_update_process_group"):
            wrapped._update_process_group(dist.group.WORLD)


def last_figures(trainer: Any) -> dict[str, Any]:
    """Reward and loss of the last step, as TRL has logged them."""
    logged = [row for row in trainer.state.log_history if "reward" in row]
    return {"reward": logged[-1]["reward"], "loss": logged[-1]["loss"]} if logged else {"reward": None, "loss": None}


def config(args: argparse.Namespace) -> GRPOConfig:
    """One prompt a GPU and step, in batches that fit the generator's. TRL asks for completions once for all micro-batches of a
    step of the optimizer: `steps_per_generation` is `gradient_accumulation_steps` where nothing else is said."""
    on_gpu = args.device == "cuda"
    return GRPOConfig(
        output_dir=args.out, max_steps=args.steps, per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.generations // args.micro_batch, num_generations=args.generations, max_completion_length=args.tokens, learning_rate=_LEARNING_RATES.get(args.shape, 1e-4), beta=0.0, logging_steps=1,
        save_strategy="no", report_to="none", bf16=on_gpu, use_cpu=not on_gpu, seed=args.seed, gradient_checkpointing=False,
        disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip


def main() -> None:
    """A process of the trainer, started by torchrun."""
    parser = argparse.ArgumentParser()
    for name in ("--shape", "--device", "--out"):
        parser.add_argument(name, required=True)
    for name in ("--steps", "--tokens", "--generations", "--seed", "--micro-batch"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    models.deterministic()
    rank, on_gpu = int(os.environ["RANK"]), args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    # It is this tenant's turn to take memory when this returns.
    worker = Worker("train", rank)
    if on_gpu:
        torch.cuda.set_device(device)
    policy = models.policy(args.shape, torch.bfloat16 if on_gpu else torch.float32, device)
    parts = {"weights": models.nbytes(policy.parameters())}
    worker.hello(gpu=models.gpu(device), parts=parts, versions=models.versions())
    rollouts = Rollouts(worker, device)
    trainer = GRPOTrainer(
        model=policy, processing_class=models.tokenizer(),
        reward_funcs=models.reward, args=config(args), train_dataset=Dataset.from_dict({"prompt": models.prompts()}),
        rollout_func=rollouts,
    )  # fmt: skip
    try:
        trainer.train()
    except Aborted:
        return
    model = rollouts.model()
    worker.say(op="done", **last_figures(trainer), fingerprint=models.fingerprint(model))
    # Takes seconds, which are no part of the last step.
    worker.serve({"sha": lambda: models.sha256(model)}, until="exit")


if __name__ == "__main__":
    main()
