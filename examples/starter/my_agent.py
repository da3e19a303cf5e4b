"""An agent with a tool: it answers the price of an item, and must look the price up.

The prices differ from record to record, so the model cannot know them. It has to call the tool ``price`` and to read
the result. A tiny model writes no JSON: here the letter ``c`` calls the tool for item ``c``, and a digit is the answer.
A language model gets the tool as ``tools=[...]`` of the request and answers with ``message.tool_calls``, as with any
OpenAI client.
"""

from trinity_mq.experience import Experience
from trinity_mq.workflows import AsyncRewardPropagationWorkflow


def price(item: str, prices: dict[str, int]) -> str:
    """Return the price of an item, or ``?`` if the item does not exist. This function is the tool."""
    return str(prices.get(item, "?"))


def reward(calls: list[str], answer: str, question: str, truth: str) -> float:
    """Return the reward of a run: 1 for the right answer, and some credit for what leads to it.

    Without the credit a model with random weights would find the right answer so rarely that it never begins to learn.
    """
    if answer == truth:
        return 1.0
    if calls:
        return 0.3 if calls[0] == question.removesuffix("?") else 0.1
    return 0.0


class MyAgent(AsyncRewardPropagationWorkflow):
    """Asks the model, runs the tool that the model calls, and asks again. One reward at the end of the run."""

    max_step_num = 2  # the call, then the answer
    stop_on_truncation = False  # max_response_tokens cuts each answer after its one letter or digit

    async def step_async(self, step_num: int) -> bool:
        """Make one request to the model; return whether another request follows."""
        if step_num == 0:
            self.calls: list[str] = []
            self.answer = ""
            self.messages = [{"role": "user", "content": self.task.raw_task["question"]}]
        # self.client is an OpenAI client. What the model samples through it becomes training data.
        reply = await self.client.chat.completions.create(model=self.model.model_name, messages=self.messages)
        text = reply.choices[0].message.content or ""
        if not text.isalpha():
            self.answer = text
            return False
        self.calls.append(text)
        result = price(text, self.task.raw_task["prices"])
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"={result};"}]
        return True

    async def reward_async(self, exps: list[Experience]) -> float:
        """Return the reward of the run. ``exps`` are the answers of the run with their tokens."""
        record = self.task.raw_task
        value = reward(self.calls, self.answer, record["question"], record["answer"])
        for experience in exps:
            experience.metrics = {"accuracy": float(value == 1.0), "tool_calls": len(self.calls)}
        return value
