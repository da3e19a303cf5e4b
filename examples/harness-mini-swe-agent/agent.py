"""mini-swe-agent 2.4.6, unmodified, as the program of a session. Arguments: configurations, as ``mini -c`` takes them.

The model's commands run in bubblewrap (``sandbox`` next to this file). A task has a ``question``, which is the task of
the agent, and an ``answer``, which the agent must submit, or else see as the output of its last command.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# otherwise: a greeting, the user's own configuration, a download of prices
os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": tempfile.mkdtemp()}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models import get_model
from minisweagent.utils.serialize import recursive_merge

SANDBOX = str(Path(__file__).with_name("sandbox"))
AT_ONCE = 8
"""Rollouts at the same time, if the process is kept."""
CONFIG = recursive_merge(*map(get_config_from_spec, sys.argv[1:]))


def reward_of(rollout: dict) -> float:
    """Run the agent on the task of a rollout. Return 1 for the right answer, else 0."""
    gateway = {"api_base": rollout["base_url"], "api_key": rollout["key"]}
    settings = {"model_kwargs": gateway, "cost_tracking": "ignore_errors"}
    model = get_model(f"openai/{rollout['model']}", recursive_merge(CONFIG["model"], settings))
    environment = BubblewrapEnvironment(
        **{**CONFIG.get("environment", {}), "executable": SANDBOX, "wrapper_args": [], "timeout": 30}
    )
    agent = DefaultAgent(model, environment, **CONFIG["agent"])
    submission = agent.run(rollout["task"]["question"])["submission"]
    outputs = [message["extra"]["raw_output"] for message in agent.messages if "raw_output" in message.get("extra", {})]
    return float((submission or (outputs or [""])[-1]).strip() == rollout["task"]["answer"])


def answer(line: str) -> None:
    """Answer a rollout in a line of JSON."""
    rollout = json.loads(line)
    try:
        result = {"reward": reward_of(rollout)}
    except Exception as error:  # of the engine or of the sandbox: the model's mistakes end the agent without one
        result = {"kind": "tool", "error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": rollout.get("id"), **result}), flush=True)


checked = subprocess.run([SANDBOX, "bash", "-c", ":"], capture_output=True, text=True)
if checked.returncode:
    sys.exit(f"no command can run in bubblewrap: {checked.stdout}{checked.stderr}")
print(json.dumps({"ready": True}), flush=True)
with ThreadPoolExecutor(AT_ONCE) as threads:
    for line in sys.stdin:
        threads.submit(answer, line)
