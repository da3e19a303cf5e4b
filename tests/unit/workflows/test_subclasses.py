"""Workflows of users: any attribute and method names, and the idioms of workflows that were written for Trinity-RFT."""

import asyncio
import dataclasses
import warnings

import pytest

from trinity_mq.rewards import RewardFn, create_reward
from trinity_mq.testing.scripted import scripted_model
from trinity_mq.workflows import (
    AsyncMathBoxedWorkflow,
    AsyncMathEvalWorkflow,
    AsyncMathWorkflow,
    AsyncMultiTurnWorkflow,
    AsyncRewardPropagationWorkflow,
    AsyncSimpleWorkflow,
    AsyncStepWiseRewardWorkflow,
    AsyncToolAgentWorkflow,
    MathBoxedWorkflow,
    MathEvalWorkflow,
    MathWorkflow,
    MultiTurnWorkflow,
    RewardPropagationWorkflow,
    SimpleWorkflow,
    StepWiseRewardWorkflow,
    Task,
    ToolAgentWorkflow,
    ToolCallWorkflow,
    Workflow,
)

_WORKFLOW = (
    "can_reset can_repeat is_async needs_history arguments_kind resettable repeatable asynchronous task model "
    "auxiliary_models auxiliary_model_wrappers repeat_times run_id_base raw_task task_desc truth format_args "
    "rollout_args workflow_args reward_fn_args is_eval logger reset set_repeat_times run run_async"
)
WORKFLOW = frozenset(_WORKFLOW.split())
"""The documented names of every workflow."""
CONVERSATION = WORKFLOW | {"process_messages_to_experience", "process_messages_to_experience_async"}
SINGLE_TURN = WORKFLOW | {"system_prompt", "reply_prefix", "reward_fn", "format_messages"}
BOXED = SINGLE_TURN | {"use_base", "with_think", "format_score_coef", "format_prompt"}
STEPS = WORKFLOW | {"client", "max_step_num", "stop_on_truncation"}
DOCUMENTED = {
    Workflow: WORKFLOW,
    MultiTurnWorkflow: CONVERSATION,
    AsyncMultiTurnWorkflow: CONVERSATION,
    StepWiseRewardWorkflow: STEPS | {"step", "reward"},
    AsyncStepWiseRewardWorkflow: STEPS | {"step_async", "reward_async"},
    RewardPropagationWorkflow: STEPS | {"step", "reward"},
    AsyncRewardPropagationWorkflow: STEPS | {"step_async", "reward_async"},
    ToolAgentWorkflow: STEPS,
    AsyncToolAgentWorkflow: STEPS,
    MathBoxedWorkflow: BOXED,
    AsyncMathBoxedWorkflow: BOXED,
} | dict.fromkeys(
    (
        SimpleWorkflow,
        AsyncSimpleWorkflow,
        MathWorkflow,
        AsyncMathWorkflow,
        MathEvalWorkflow,
        AsyncMathEvalWorkflow,
        ToolCallWorkflow,
    ),
    SINGLE_TURN,
)
"""The documented names of the classes that users derive from."""

_FREE = (
    # helpers of release 0.2.0
    "answers arguments ask ask_async body default_reward_fn default_system_prompt errors final_reward finished "
    "has_greedy_baseline numbered prompt question recorded_step responses rewarded sampling take_step teacher toolbox "
    "tools uses_truth calls answer messages judge append_message "
    # assigned by workflows for Trinity-RFT
    "_judge_client _judge_model_name _openai_client _step_meta accuracy_reward action action_map action_space "
    "action_truth actual_turns agent agent_max_steps agent_model agentscope_model all_experience_data_num "
    "answer_parser answer_type auto_submit auxiliary_chat_models base_url block board cache_length chat_model "
    "code_timeout correct_threshold current_observation current_step data_dir data_path dataset default_exp "
    "default_second_exp desc done enable_overlong_penalty env env_kwargs env_max_steps epsilon eval_dir eval_gen_args "
    "ever_read_message_ids experience_round format_reward format_score_coef fusion_mode game_file_path goal_position "
    "ground_truth gym_env history_length image_name images info_truth invalid_action is_slippery jinja_env judge_func "
    "last_action last_board last_observation llm_api_key max_attempts max_env_steps max_model_tokens "
    "max_moves_per_step max_reflect_tokens max_response_length max_response_tokens max_steps max_tokens max_turns "
    "memory message_id_list meta metric_key model_client model_name n non_sft_dir numbers observation "
    "only_train_success openai_async_client openai_client operator p pairs pattern penalty_factor prompt_dir "
    "prompt_key query query_idx read_batch_size reflection_template response_key response_structure reward_scale "
    "reward_shaping_configs rollout_num rubric search_client seed session_id sft_dir size solution split step_count "
    "step_rewards target task_type teacher_model temperature threshold timeout tool_handler toolkit top_k top_p "
    "train_dir train_mode use_base use_llm_judge verbose videos with_think workflow_func "
    # methods of workflows for Trinity-RFT
    "_build_judge _build_metrics _build_prompt _parse_model_response _run_conversation_with_tools _setup_environment "
    "calculate_reward compute_reward construct_experiences create_environment env_step eval_answer execute_tool "
    "format_prompt generate get_action get_judge_reward get_model_response get_prompt get_ruler_scores judge_result "
    "llm_reward parse_action render success "
    # names that anybody may choose
    "ask_model body_text config context counter data episode episodes examples experience experiences game grader "
    "history id info instructions kwargs key metrics name names number options output outputs parameters played "
    "plan prefix prompts questions record records request requests result results retries reward_model rewards rng "
    "score scores state status steps system text texts turn turns version worth"
)
FREE = _FREE.split()
"""Names that workflows of users give to attributes of their own."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


CALLS = '[{"name": "add", "arguments": {"a": 3, "b": 4}}]'
CONVERSATIONS = [{"from": "human", "value": "3+4?"}]


def concrete(base):
    """Return a subclass that can run; step-wise classes make two steps."""
    if "step" in vars_of(base):

        class Steps(base):
            max_step_num = 2

            def step(self, step_num):
                self.client.chat.completions.create(
                    model=self.client.model_path, messages=[{"role": "user", "content": f"step {step_num}"}]
                )
                return True

            def reward(self, exps, step_num=0):
                return float(len(exps))

        return Steps
    if "step_async" in vars_of(base):

        class AsyncSteps(base):
            max_step_num = 2

            async def step_async(self, step_num):
                await self.client.chat.completions.create(
                    model=self.client.model_path, messages=[{"role": "user", "content": f"step {step_num}"}]
                )
                return True

            async def reward_async(self, exps, step_num=0):
                return float(len(exps))

        return AsyncSteps
    if base in {Workflow, MultiTurnWorkflow}:

        class Asks(base):
            def run(self):
                [answer] = self.model.chat([{"role": "user", "content": self.task_desc}], n=1)
                answer.reward = 1.0
                return [answer]

        return Asks
    if base is AsyncMultiTurnWorkflow:

        class Converses(base):
            async def run_async(self):
                messages = [{"role": "user", "content": self.task_desc}, {"role": "assistant", "content": "7"}]
                return [await self.process_messages_to_experience_async(messages, 1.0, {"turns": 1})]

        return Converses
    return type("Derived", (base,), {})


def vars_of(kind):
    return {name for base in kind.__mro__ for name in vars(base)}


def task_for(kind, workflow, **fields):
    record = {"question": "3+4?", "answer": "7"}
    args = {}
    if issubclass(kind, ToolAgentWorkflow):
        args = {"tools": [f"{__name__}.add"]}
    if issubclass(kind, ToolCallWorkflow):
        record = {"tools": '[{"name": "add"}]', "conversations": CONVERSATIONS, "answer": CALLS}
    task = {"raw_task": record, "workflow_args": args, "is_eval": issubclass(kind, MathEvalWorkflow)}
    return Task(workflow=workflow, **{**task, **fields})


async def run(workflow):
    if workflow.is_async:
        return await workflow.run_async()
    return await asyncio.to_thread(workflow.run)


def answer_to(kind):
    calls = issubclass(kind, ToolCallWorkflow)
    return lambda prompt: "<think>3+4</think> " + (f"<tool_call>{CALLS}</tool_call>" if calls else "\\boxed{7}")


@pytest.mark.parametrize("kind", DOCUMENTED, ids=lambda kind: kind.__name__)
async def test_a_base_class_has_no_public_name_that_is_not_documented(kind):
    names = {name for name in dir(kind) if not name.startswith("_")} - set(dir(object))
    assert names <= DOCUMENTED[kind]
    async with scripted_model(answer_to(kind)) as model:
        workflow = task_for(kind, concrete(kind)).to_workflow(model)
        await run(workflow)
    assert {name for name in vars(workflow) if not name.startswith("_")} <= DOCUMENTED[kind]


@pytest.mark.parametrize("place", ["instance", "class"])
@pytest.mark.parametrize("kind", DOCUMENTED, ids=lambda kind: kind.__name__)
async def test_a_subclass_may_have_attributes_of_any_name(kind, place):
    """They are assigned before and after the constructor of the base class and in reset(), or belong to the class."""
    base = concrete(kind)
    names = {name: {"mine": name} for name in set(FREE) - DOCUMENTED[kind]}

    class Mine(base):
        def __init__(self, *, task, model, auxiliary_models=None):
            vars(self).update(names)
            super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
            vars(self).update(names)

        def reset(self, task):
            super().reset(task)
            vars(self).update(names)

    mine = Mine if place == "instance" else type("Filled", (base,), names)
    async with scripted_model(answer_to(kind)) as model:
        plain = await run(task_for(kind, base).to_workflow(model))
        workflow = task_for(kind, mine).to_workflow(model)
        experiences = await run(workflow)
        if kind.can_reset:
            workflow.reset(task_for(kind, mine))
            experiences += await run(workflow)
            plain *= 2
    assert [(one.response_text, one.reward, one.eid.step) for one in experiences] == [
        (one.response_text, one.reward, one.eid.step) for one in plain
    ]
    assert {name: getattr(workflow, name) for name in names} == names, "it kept its own"


class Plain(RewardFn):
    """As in Trinity-RFT: arguments by name, without `finished`."""

    def __init__(self, worth=1.0):
        self.worth = worth

    def __call__(self, response, truth=None):
        return {"accuracy": self.worth * (truth in response)}


class Replaces(SimpleWorkflow):
    """Resets before the base class is made, and replaces what it reads from the task."""

    def __init__(self, *, task, model, auxiliary_models=None):
        self.reset(task)
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def reset(self, task):
        self.format_args = task.format_args
        self.system_prompt = "Be brief."
        self.reply_prefix = None
        self.raw_task = task.raw_task
        self.task_desc = task.raw_task["problem"]
        self.truth = task.raw_task["solution"]
        self.reward_fn = Plain(**task.reward_fn_args)


class Formats(Replaces):
    """Its prompt has the form of messages already."""

    def format_messages(self):
        question = {"role": "user", "content": self.task_desc}
        return [question, {"role": "assistant", "content": "?"}, {"role": "user", "content": "answer!"}]


@pytest.mark.parametrize("kind", [Replaces, Formats])
async def test_what_a_subclass_replaces_is_used(kind):
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        return "it is 7"

    record = {"problem": "3+4?", "solution": "7"}
    async with scripted_model(script) as model:
        workflow = Task(workflow=kind, raw_task=record, reward_fn_args={"worth": 2.0}).to_workflow(model)
        workflow.set_repeat_times(2, 4)
        experiences = await run(workflow)
        workflow.reset(Task(workflow=kind, raw_task={"problem": "5+5?", "solution": "10"}))
        others = await run(workflow)
    assert [(one.reward, one.eid.run) for one in experiences] == [(2.0, 4), (2.0, 5)]
    assert {one.reward for one in others} == {0.0}
    assert ("Be brief." in prompts[0]) is (kind is Replaces)
    assert ["3+4?" in prompt for prompt in prompts] == [True, True, False, False]


class RunsItself(SimpleWorkflow):
    """Calls the task's reward by name, with arguments of which the function takes some."""

    def run(self):
        (answer,) = self.model.chat(self.format_messages(), n=1)
        tokens = answer.tokens[answer.prompt_length :]
        arguments = {"truth": self.truth, "response_token": tokens, "info": answer.info, "with_think": False}
        answer.metrics = self.reward_fn(response=answer.response_text, **arguments)
        answer.reward = sum(answer.metrics.values())
        return [answer]


def counts(response, truth, response_token, **options):
    options["info"]["seen"] = len(response_token)
    return {"length": float(len(response_token)), "options": float("with_think" in options)}


@pytest.mark.parametrize(
    ("reward_fn", "reward"), [(Plain, 1.0), ("math_answer", 1.0), ("math_reward", None), (counts, 9.0)]
)
async def test_a_reward_may_be_called_by_name(reward_fn, reward):
    async with scripted_model(["\\boxed{7}"]) as model:
        [experience] = await run(task_for(SimpleWorkflow, RunsItself, reward_fn=reward_fn).to_workflow(model))
    assert experience.reward == sum(experience.metrics.values())
    assert reward is None or experience.reward >= reward


class Thinks(RewardFn):
    def __call__(self, response, truth=None, with_think=None, format_score_coef=None, **kwargs):
        assert kwargs["info"]["engine"] == "scripted"
        return {"think": float(with_think), "coef": format_score_coef, "tokens": float(len(kwargs["response_token"]))}


class Prepares(MathBoxedWorkflow):
    """Its reset() replaces that of the base class, and the arguments with it."""

    def reset(self, task):
        self.use_base, self.with_think, self.format_score_coef = True, True, 0.25
        self.system_prompt = "Count."
        self.task_desc, self.truth = "3+4?", "7"
        self.reward_fn = Thinks()


@pytest.mark.parametrize("kind", [Prepares, MathBoxedWorkflow])
async def test_boxed_math_gives_its_arguments_to_a_reward_also_if_a_subclass_prepares_itself(kind):
    prompts = []

    def script(prompt):
        prompts.append(prompt)
        return "seven"

    args = {"use_base": True, "with_think": True, "format_score_coef": 0.25}
    async with scripted_model(script) as model:
        task = task_for(MathBoxedWorkflow, kind, workflow_args=args, reward_fn=Thinks)
        [experience] = await run(task.to_workflow(model))
    assert experience.metrics == {"think": 1.0, "coef": 0.25, "tokens": 6.0}
    assert prompts[0].startswith("System:Count.") is (kind is Prepares)


def test_a_reward_made_has_the_attributes_of_the_instance():
    reward = create_reward(Plain, {"worth": 3.0})
    assert reward.worth == 3.0
    assert isinstance(reward, RewardFn)
    assert issubclass(Plain, RewardFn)
    with pytest.raises(AttributeError, match="colour"):
        _ = reward.colour


async def test_dataclasses_of_a_task_can_be_converted_in_a_subclass():
    class Converts(SimpleWorkflow):
        @property
        def rollout_args(self):
            return {**dataclasses.asdict(self.task.rollout_args), "temperature": 0.5}

        def run(self):
            return self.model.chat(self.format_messages(), **self.rollout_args)

    async with scripted_model(["a", "b"]) as model:
        workflow = task_for(SimpleWorkflow, Converts).to_workflow(model)
        workflow.set_repeat_times(2, 0)
        assert [one.response_text for one in await run(workflow)] == ["a", "b"]


async def test_a_helper_that_was_overridden_by_its_older_name_still_is():
    with pytest.warns(DeprecationWarning, match="Older.rewarded overrides a helper that is now _rewarded_responses"):

        class Older(SimpleWorkflow):
            def rewarded(self, responses):
                for response in super()._rewarded_responses(responses):
                    response.reward += 0.5
                return responses

    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Unrelated(SimpleWorkflow):
            """Other forms, or a run of its own: not the older helpers."""

            def body(self):
                return "a text"

            def rewarded(self, responses, weight):
                return responses * weight

        class Own(SimpleWorkflow):
            async def body(self):
                raise AssertionError

            def run(self):
                return super().run()

    async with scripted_model(lambda prompt: "7") as model:
        rewards = [
            (await run(task_for(SimpleWorkflow, kind).to_workflow(model)))[0].reward for kind in (Older, Unrelated, Own)
        ]
    assert rewards == [1.5, 1.0, 1.0]
