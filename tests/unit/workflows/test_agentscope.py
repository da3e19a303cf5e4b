"""Agents of AgentScope 1.x on a scripted model behind the real engine server, with the real package."""

from __future__ import annotations

import importlib.util
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.workflows.scripted_runs import run_scripted, tool_call
from trinity_mq.config import FormatConfig
from trinity_mq.experience import Experience
from trinity_mq.testing.scripted import Answer, scripted_model
from trinity_mq.workflows import RunFailedError, Task, TaskError, load_workflow
from trinity_mq.workflows.agentscope.adapter import AgentScopeAdapterArguments
from trinity_mq.workflows.agentscope.email_search import EmailSearchArguments, MailArchive
from trinity_mq.workflows.agentscope.react import bare_truth, boxed_parts, says_right

HAS = importlib.util.find_spec("agentscope") is not None
real = pytest.mark.skipif(not HAS, reason="AgentScope 1.x is not installed: extra agentscope")
pytestmark = pytest.mark.filterwarnings("ignore")  # of AgentScope and its packages


async def run(
    name: str, record: dict[str, Any], answers: Sequence[Answer], judged: Sequence[str] = (), **keys: Any
) -> tuple[list[Experience], list[str]]:
    """Return the experiences of a run, and the prompts of its requests.

    Args:
        name: Name of the workflow.
        record: The record, with ``question`` and ``answer``.
        answers: What the model answers.
        judged: What the auxiliary model answers.
        keys: Further fields of the task.
    """
    task = Task(
        workflow=load_workflow(name),
        raw_task=record,
        format_args=FormatConfig(prompt_key="question", response_key="answer"),
        **keys,
    )
    async with scripted_model(list(judged)) as judge:
        models = [judge] if judged else []
        experiences, generator = await run_scripted(task, list(answers), auxiliary_models=models)
    return experiences, generator.prompts


SUM = {"question": "2+3?", "answer": "I add. #### 5"}


@real
async def test_a_react_agent_is_rewarded_for_its_boxed_result() -> None:
    said = [tool_call("generate_response", result="\\boxed{5}"), "It is five."]
    first, last = (await run("agentscope_react_workflow", SUM, said))[0]
    assert (first.eid.step, last.eid.step) == (0, 1)
    assert (first.reward, last.reward) == (1.0, 1.0)
    assert last.metrics["accuracy"] == 1.0
    assert last.metrics["react_memory_length"] >= 3
    experiences, prompts = await run(
        "as_react_workflow", SUM, [tool_call("generate_response", result="\\boxed{6}"), "It is six."]
    )
    assert experiences[0].reward == 0.0
    assert "You are an agent specialized in solving math problems with tools." in prompts[0]
    assert "generate_response" in prompts[0]


@real
async def test_a_program_of_the_model_runs_in_a_sandbox() -> None:
    code = "import os\nprint(2 + 3, sorted(os.environ))\nprint('late', file=__import__('sys').stderr)"
    said = [
        tool_call("execute_python_code", code=code),
        tool_call("generate_response", result="\\boxed{5}"),
        "It is five.",
    ]
    experiences, prompts = await run("agentscope_react_math_workflow", SUM, said)
    assert [experience.reward for experience in experiences] == [1.0] * 3
    assert "<returncode>0</returncode><stdout>5 ['HOME'," in prompts[1]
    assert "<stderr>late" in prompts[1]
    assert "PYTHONPATH" not in prompts[1].rpartition("<stdout>")[2]
    slow = [tool_call("execute_python_code", code="while True: pass", timeout=1), *said[1:]]
    _, prompts = await run("agentscope_react_math_workflow", SUM, slow)
    assert "<returncode>-1</returncode>" in prompts[1]
    assert "TimeoutError: The code execution exceeded the timeout of 1 seconds." in prompts[1]


class Output:
    def __init__(self, **keys: Any) -> None:
        self.__dict__.update({"reward": None, "response": None, "metrics": None, **keys})


async def solve(task: dict[str, Any], model: Any) -> Output:
    """Ask once."""
    answered = await model([{"role": "user", "content": task["question"]}])
    return Output(response=answered.content[0]["text"], metrics={"asked": 1.0})


async def judge(task: dict[str, Any], response: str, auxiliary_models: dict[str, Any]) -> Output:
    """Ask an auxiliary model for the reward."""
    (model,) = auxiliary_models.values()
    answered = await model([{"role": "user", "content": f"{task['answer']} {response}"}])
    return Output(reward=float(answered.content[0]["text"]), metrics={"judged": 1.0})


async def solve_older(task: dict[str, Any], model: Any) -> float:
    """Ask twice; return the reward."""
    answers = [await model([{"role": "user", "content": task["question"]}]) for _ in range(2)]
    return float(answers[-1].content[0]["text"] == "5")


async def silent(task: dict[str, Any], model: Any) -> Output:
    """Ask nothing."""
    return Output(reward=1.0)


HERE = "tests.unit.workflows.test_agentscope"


@real
async def test_functions_of_agentscope_are_workflows() -> None:
    arguments = {"workflow_func": f"{HERE}.solve", "judge_func": f"{HERE}.judge"}
    [experience], prompts = await run("agentscope_workflow_adapter_v1", SUM, ["5"], ["0.75"], workflow_args=arguments)
    assert "2+3?" in prompts[0]
    assert experience.reward == 0.75
    assert experience.metrics | {"asked": 1.0, "judged": 1.0} == experience.metrics
    experiences, _ = await run(
        "agentscope_workflow_adapter", SUM, ["4", "5"], workflow_args={"workflow_func": solve_older}
    )
    assert [(one.eid.step, one.reward) for one in experiences] == [(0, 1.0), (1, 1.0)]


@real
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, TaskError, "workflow_args.workflow_func is None, wanted the dotted path of an async function"),
        ({"workflow_func": f"{HERE}.tool_call"}, TaskError, "wanted the dotted path of an async function"),
        ({"workflow_func": silent}, RunFailedError, "the agent has not asked the model"),
        ({"workflow_func": solve}, RunFailedError, "workflow_func gave the reward None, wanted a number"),
    ],
)
async def test_functions_that_cannot_be_used_say_so(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await run("agentscope_workflow_adapter_v1", SUM, ["5"], workflow_args=arguments)


@pytest.mark.skipif(HAS, reason="AgentScope is installed")
async def test_without_agentscope_validate_and_the_run_name_the_extra() -> None:
    assert AgentScopeAdapterArguments().missing() == [
        "AgentScope 1.x is not installed: pip install 'trinity-mq[agentscope]'"
    ]
    with pytest.raises(TaskError, match=r"trinity-mq\[agentscope\]"):
        await run("agentscope_react_workflow", SUM, [])


@pytest.fixture
def mails(tmp_path: Path) -> Path:
    """A database of two mails, in the form of Trinity-RFT's."""
    path = tmp_path / "mails.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE emails (id INTEGER PRIMARY KEY, message_id TEXT, subject TEXT, from_address TEXT, date TEXT,
                             body TEXT, file_name TEXT);
        CREATE TABLE recipients (email_id INTEGER, recipient_address TEXT, recipient_type TEXT);
        CREATE VIRTUAL TABLE emails_fts USING fts5(subject, body, content='emails', content_rowid='id');
        INSERT INTO emails VALUES
            (1, '<a@x>', 'Budget', 'bo@x.com', '2001-05-04 10:00:00', 'The budget is 7 million.', 'a.txt'),
            (2, '<b@x>', 'Lunch', 'cy@x.com', '2001-05-05 10:00:00', 'Lunch at noon, no budget.', 'b.txt');
        INSERT INTO recipients VALUES (1, 'al@x.com', 'to'), (1, 'cy@x.com', 'CC'), (2, 'bo@x.com', 'to');
        INSERT INTO emails_fts (rowid, subject, body) SELECT id, subject, body FROM emails;
        """
    )
    connection.commit()
    connection.close()
    return path


def test_mails_are_searched_and_read_as_in_trinity(mails: Path) -> None:
    mailbox = MailArchive(str(mails))
    [found] = mailbox.search("al@x.com", ["budget"], "2001-06-01")
    assert found == {"message_id": "<a@x>", "snippet": "<b>Budget</b>"}
    assert [one["message_id"] for one in mailbox.search("cy@x.com", ["budget"], "2001-06-01")] == ["<b@x>", "<a@x>"]
    assert mailbox.search("cy@x.com", ["budget"], "2001-05-05") == [{"message_id": "<a@x>", "snippet": "<b>Budget</b>"}]
    assert mailbox.search("al@x.com", ['bud"get OR (', "*"], "2001-06-01") == []
    with pytest.raises(ValueError, match="keywords is empty"):
        mailbox.search("al@x.com", [], "2001-06-01")
    assert mailbox.mail("<a@x>") == {
        "message_id": "<a@x>",
        "date": "2001-05-04 10:00:00",
        "subject": "Budget",
        "from_address": "bo@x.com",
        "to_addresses": ["al@x.com"],
        "cc_addresses": ["cy@x.com"],
        "bcc_addresses": [],
        "body": "The budget is 7 million.",
        "file_name": "a.txt",
    }
    assert mailbox.mail("<c@x>") is None
    assert (mailbox.found, mailbox.read) == ({"<a@x>", "<b@x>"}, {"<a@x>", "<c@x>"})


MAIL = {
    "id": 1,
    "question": "What is the budget?",
    "answer": "7 million",
    "message_ids": ["<a@x>"],
    "how_realistic": 0.9,
    "inbox_address": "al@x.com",
    "query_date": "2001-05-31",
}
SEARCH = tool_call("search_emails", inbox_address="al@x.com", query_date="2001-05-31", keywords=["budget"])


@real
async def test_an_answer_from_mails_is_worth_more_with_its_source(mails: Path) -> None:
    arguments: dict[str, Any] = {"workflow_args": {"database": str(mails), "max_turns": 10}}
    final = tool_call("generate_response", answer="7 million", sources=["<a@x>"])
    said = [SEARCH, tool_call("read_email", message_id="<a@x>"), final, "Seven million."]
    experiences, prompts = await run("email_search_workflow", MAIL, said, ["**true**"], **arguments)
    assert "User's email address is al@x.com\nToday's date is 2001-05-31\n" in prompts[0]
    assert "<b>Budget</b>" in prompts[1]
    assert "The budget is 7 million." in prompts[2]
    assert [one.reward for one in experiences] == pytest.approx([1 + 1 + 0.3 + 0.1 + 0.1 * (1 - 4 / 10)] * 4)
    experiences, _ = await run("email_search_workflow", MAIL, said, ["false"], **arguments)
    assert experiences[0].reward == pytest.approx(-1 + 0.3)
    plain: dict[str, Any] = {**arguments, "reward_fn_args": {"llm_as_a_judge": False}}
    experiences, _ = await run("email_search_workflow", MAIL, said, **plain)
    assert experiences[0].metrics | {"accuracy": 1.0, "format": 0.0} == experiences[0].metrics


def test_mails_that_are_not_there_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DEFAULT_EMAIL_DB_PATH", raising=False)
    assert "the mails are in no package: neither workflow_args.database nor" in EmailSearchArguments().missing()[-1]
    monkeypatch.setenv("DEFAULT_EMAIL_DB_PATH", str(tmp_path / "mails.db"))
    assert "there is no file" in EmailSearchArguments().missing()[-1]
    assert "prepare_data.py" in EmailSearchArguments().missing()[-1]


SERVER = """#!{python}
import os, sys
assert sys.argv[1:] == ["-y", "mcp-searxng"] and os.environ["SEARXNG_URL"] == "http://search"
from mcp.server.fastmcp import FastMCP
server = FastMCP("search")
@server.tool()
def search(query: str) -> str:
    "Search the web."
    return "found " + query
server.run()
"""


@real
async def test_a_search_of_the_web_is_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="SEARXNG_URL is not set"):
        await run("agentscope_v1_react_search_workflow", SUM, [], ["YES"])
    monkeypatch.setenv("SEARXNG_URL", "http://search")
    npx = tmp_path / "npx"
    npx.write_text(SERVER.format(python=sys.executable))
    npx.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said = [tool_call("search", query="sum"), tool_call("generate_response", result="5"), "Five."]
    verdict = "1. **Reasoning**: equal\n2. **Correctness**: YES"
    experiences, prompts = await run("agentscope_v1_react_search_workflow", SUM, said, [verdict])
    assert "found sum" in prompts[1]
    assert [one.reward for one in experiences] == [1.0] * 3
    assert experiences[0].metrics["max_turns"] == 10.0


def test_verdicts_and_truths_are_read_as_in_trinity() -> None:
    assert says_right("**correctness**: yes")
    assert not says_right("Correctness: NO\nYES")
    assert not says_right("Correctness " * 100_000)
    assert (bare_truth("so #### 5 "), bare_truth(7)) == ("5", "7")
    assert boxed_parts("\\boxed{None}", None)["accuracy"] == 0.0
