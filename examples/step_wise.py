"""A workflow with a reward at every step: take the largest digit that is left, then the largest of the rest."""

from trinity_mq.experience import Experience
from trinity_mq.workflows import StepWiseRewardWorkflow


class LargestFirst(StepWiseRewardWorkflow):
    max_step_num = 2
    stop_on_truncation = False  # max_tokens cuts each answer after its one digit

    def step(self, step_num: int) -> bool:
        if step_num == 0:
            self.left: list[str] = self.task.raw_task["question"].removesuffix("=").split(",")
        answer = self.client.chat.completions.create(
            model=self.model.model_name,
            messages=[{"role": "user", "content": ",".join(self.left) + "="}],
            max_tokens=1,
        )
        largest = max(self.left)
        self.right = bool(answer.choices[0].message.content == largest)
        self.left.remove(largest)
        return self.right  # whether to go on

    def reward(self, exps: list[Experience], step_num: int) -> float:
        for experience in exps:
            experience.metrics["accuracy"] = float(self.right)
        return float(self.right)
