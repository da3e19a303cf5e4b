"""A workflow of Trinity-RFT 0.6: one request for all runs of a slice, and a reward for each response."""

from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows import WORKFLOWS, Task, Workflow
from trinity.utils.log import get_logger


@WORKFLOWS.register_module("steps_workflow")
class StepsWorkflow(Workflow):
    can_reset = True
    can_repeat = True
    is_async = True

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
    ):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.logger = get_logger(__name__)
        self.reset(task)

    def reset(self, task: Task):
        self.task = task
        self.question = task.task_desc
        self.truth = task.truth
        self.reward_fn = task.reward_fn(**task.reward_fn_args)

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base

    async def run_async(self) -> list[Experience]:
        messages = [
            {"role": "system", "content": "Write one step a line. Write the result in the last line."},
            {"role": "user", "content": self.question},
        ]
        responses = await self.model.chat_async(
            messages, n=self.repeat_times, temperature=self.task.rollout_args.temperature
        )
        for index, response in enumerate(responses):
            rewards = self.reward_fn(response=response.response_text, truth=self.truth)
            response.metrics = {**(response.metrics or {}), **rewards}
            response.reward = sum(rewards.values())
            response.eid.run = self.run_id_base + index
        return responses
