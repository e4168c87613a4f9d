"""Two parts that verl lets its user replace, so that two runs can have the same bits.

verl as published gives requests no seed of their own, and orders a batch as its answers came. It is unmodified: the settings
`agent_loop_config_path` and `custom_sampler` name these classes. They know nothing of Sublet.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

#: So many answers to one prompt at most, and so many prompts.
ANSWERS_MAX, PROMPTS_MAX = 1_000, 100_000


class SeededLoop(SingleTurnAgentLoop):
    """One turn, each request with a seed by its step, prompt and answer."""

    def __init__(self, **given: Any) -> None:
        # By the type of the model verl would ask for Qwen's marks of turns, which the tokenizer that was made has not.
        super().__init__(**{**given, "hf_model_type": None})

    async def run(self, sampling_params: dict[str, Any], **given: Any) -> Any:
        """Asks the engine for one answer."""
        step, prompt, answer = (int(given[name]) for name in ("global_steps", "index", "session_id"))
        seed = (step * PROMPTS_MAX + prompt) * ANSWERS_MAX + answer
        return await super().run({**sampling_params, "seed": seed}, **given)


class OrderedBuffer(ReplayBuffer):
    """Orders a batch by prompt and answer, whichever came first."""

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, Any]) -> Any:
        """The batch of these prompts."""
        place = {uid: number for number, uid in enumerate(self.prompt_global_steps[partition_id])}

        def where(entry: tuple[str, Any]) -> tuple[int, int, int]:
            uid, answer, part = entry[0].rsplit("_", 2)
            return place.get(uid, 0), int(answer), int(part)

        ordered = dict(sorted(partition_snapshot.items(), key=where))
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)
