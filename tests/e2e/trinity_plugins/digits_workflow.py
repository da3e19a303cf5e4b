"""A workflow as users of Trinity-RFT write them; only its import lines are ours."""

from __future__ import annotations

from trinity_mq.experience import Experience
from trinity_mq.models import ModelWrapper
from trinity_mq.workflows import WORKFLOWS, Task, Workflow


@WORKFLOWS.register_module("trinity_digits_workflow")
class DigitsWorkflow(Workflow):
    can_reset: bool = True
    can_repeat: bool = True

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None
    ):  # fmt: skip
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task):
        self.task = task
        self.format_args = task.format_args
        self.raw_task = task.raw_task
        self.task_desc = task.task_desc
        self.truth = task.truth
        self.reward_fn = task.reward_fn(**task.reward_fn_args)

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times = repeat_times
        self.task.rollout_args.n = repeat_times
        self.run_id_base = run_id_base

    def run(self) -> list[Experience]:
        messages = [{"role": "user", "content": self.task_desc}]
        responses = self.model.chat(messages, n=self.repeat_times, temperature=self.task.rollout_args.temperature)
        for i, response in enumerate(responses):
            rewards = self.reward_fn(response=response.response_text, truth=self.truth)
            if response.metrics is None:
                response.metrics = {}
            response.metrics.update(rewards)
            response.reward = sum(rewards.values())
            response.eid.run = i + self.run_id_base
        return responses
