"""mini-swe-agent 2.4.6, unmodified, as the program of a session. Arguments: configurations, as ``mini -c`` takes them.

The model's commands run in bubblewrap (``sandbox.py``). A task has a ``question``, which is the task of the agent, and
an ``answer``, which the agent must submit, or else see as the output of its last command.
"""

import os
import subprocess
import sys
import tempfile

# otherwise it prints a greeting, reads the user's configuration, downloads prices and retries with long pauses
os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": tempfile.gettempdir()}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2"}

import rollouts
import sandbox
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models import get_model
from minisweagent.utils.serialize import recursive_merge

tempfile.tempdir = sandbox.reachable_folder()
CONFIG = recursive_merge(*map(get_config_from_spec, sys.argv[1:]))
SANDBOX = sandbox.__file__
IN_SANDBOX = {"executable": SANDBOX, "wrapper_args": [], "timeout": 30}


def reward_of(rollout: dict) -> float:
    """Run the agent on the task of a rollout. Return 1 for the right answer, else 0."""
    gateway = {"model_kwargs": {"api_base": rollout["base_url"], "api_key": rollout["key"]}}
    settings = recursive_merge(CONFIG["model"], gateway, {"cost_tracking": "ignore_errors"})
    environment = BubblewrapEnvironment(**{**CONFIG.get("environment", {}), **IN_SANDBOX})
    agent = DefaultAgent(get_model(f"openai/{rollout['model']}", settings), environment, **CONFIG["agent"])
    submission = agent.run(rollout["task"]["question"])["submission"]
    outputs = [message["extra"]["raw_output"] for message in agent.messages if "raw_output" in message.get("extra", {})]
    return float((submission or (outputs or [""])[-1]).strip() == rollout["task"]["answer"])


checked = subprocess.run([SANDBOX, "bash", "-c", ":"], capture_output=True, text=True, check=False)
if checked.returncode:
    sys.exit(f"no command can run in bubblewrap: {checked.stdout}{checked.stderr}")
rollouts.serve(reward_of)
