"""Tests of the agent with a scripted model: no broker, no training. Run them with
``python -m unittest -b`` or pytest.
"""

import asyncio
import unittest

import my_agent

from trinity_mq.testing.scripted import scripted_model
from trinity_mq.workflows import Task

RECORD = {"question": "c?", "answer": "6", "prices": {"a": 3, "c": 6}}


def run_agent(*answers):
    """Run the agent once on RECORD, with a model that gives these answers. Return the experiences of the run."""

    async def run():
        async with scripted_model(answers) as model:
            task = Task(workflow=my_agent.MyAgent, raw_task=RECORD)
            return await task.to_workflow(model).run_async()

    return asyncio.run(run())


class TestMyAgent(unittest.TestCase):
    def test_it_looks_the_price_up_and_answers_it(self):
        call, answer = run_agent("c", "6")
        assert (call.response_text, answer.response_text) == ("c", "6")
        assert "=6;" in answer.prompt_text  # the model has read the result of the tool
        assert (call.reward, answer.reward) == (1.0, 1.0)  # both requests share the reward of the run

    def test_a_wrong_price_is_worth_less(self):
        experiences = run_agent("c", "5")
        assert [experience.reward for experience in experiences] == [0.3, 0.3]

    def test_a_guess_without_the_tool_is_worth_nothing_unless_it_is_right(self):
        [guess] = run_agent("5")
        assert (guess.reward, guess.metrics["tool_calls"]) == (0.0, 0)

    def test_an_item_that_does_not_exist_has_no_price(self):
        assert my_agent.price("z", RECORD["prices"]) == "?"


if __name__ == "__main__":
    unittest.main()
