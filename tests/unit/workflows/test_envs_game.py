"""A game of one's own, as a user writes it."""

import threading

import pytest

from trinity_mq.workflows import Task, execute
from trinity_mq.workflows.games import AsyncGameWorkflow, Game, GameWorkflow
from trinity_mq.workflows.games.game import MAX_SEEN, GameArguments

made_in = []


class Guess(Game):
    """Guess a number; told higher or lower."""

    instructions = "Guess a number."

    def __init__(self, number):
        self.number, self.last, self.seen = number, None, []
        made_in.append(threading.current_thread())

    def show(self):
        return "?"

    def play(self, answer):
        self.seen.append(answer)
        self.last = int(answer) if answer.isdecimal() else None
        if self.last is None:
            return "No number."
        return "Higher." if self.last < self.number else "Lower."

    @property
    def over(self):
        return self.won

    @property
    def won(self):
        return self.last == self.number


class GuessArguments(GameArguments):
    number: int = 7


class GuessWorkflow(GameWorkflow):
    arguments_kind = GuessArguments

    def make_game(self):
        self.game = Guess(self.arguments.number)
        return self.game


class AsyncGuessWorkflow(AsyncGameWorkflow):
    arguments_kind = GuessArguments

    def make_game(self):
        self.game = Guess(self.arguments.number)
        return self.game


BOTH = pytest.mark.parametrize("kind", [GuessWorkflow, AsyncGuessWorkflow])


async def run(kind, model, **keys):
    workflow = Task(workflow=kind, **keys).to_workflow(model)
    return workflow, await execute(lambda: workflow, kind)


@BOTH
async def test_it_is_played_until_it_is_won(kind, stub_model):
    model = stub_model(["3", "9", "7", "never"], enable_history=True)
    _, experiences = await run(kind, model)
    assert [(exp.response_text, exp.reward) for exp in experiences] == [("3", 1.0), ("9", 1.0), ("7", 1.0)]
    assert experiences[0].metrics == {"success": 1.0, "prompt_too_long": 0.0, "actual_env_steps": 3}
    said = [messages[-1]["content"] for messages, _ in model.calls]
    assert said == ["?", "Higher.\n\n?", "Lower.\n\n?"]
    assert model.calls[0][0][0] == {"role": "system", "content": "Guess a number."}


@BOTH
async def test_of_a_long_answer_the_end_is_played(kind, stub_model):
    model = stub_model(["x" * MAX_SEEN + "end", "7"], enable_history=True)
    workflow, _ = await run(kind, model)
    assert workflow.game.seen[0] == "x" * (MAX_SEEN - 3) + "end"
    assert model.calls[1][0][2]["content"].endswith("xend"), "the conversation keeps all that was sampled"


@BOTH
async def test_games_are_not_made_on_the_event_loop(kind, stub_model):
    made_in.clear()
    await run(kind, stub_model(["7"], enable_history=True))
    assert made_in[0] is not threading.current_thread()
