"""OpenAI Codex CLI (npm package ``@openai/codex``), unmodified, on tasks that ask for the file ``answer.txt``."""

from collections.abc import Mapping
from pathlib import Path

from trinity_mq.gateway.local import LocalSession
from trinity_mq.workflows.sessions.sandboxed_agent import Judged, SandboxedAgentWorkflow, read_text

CONFIG = """
model = "{model}"
model_provider = "gateway"
model_reasoning_summary = "none"
approval_policy = "never"
sandbox_mode = "danger-full-access"  # the whole agent runs in a sandbox
check_for_update_on_startup = false
analytics.enabled = false
model_providers.gateway = {{ name = "gateway", base_url = "{url}", env_key = "OPENAI_API_KEY", wire_api = "responses" }}
"""


class Codex(SandboxedAgentWorkflow):
    """Reward 1 if ``answer.txt`` holds the answer."""

    def files(self, session: LocalSession) -> Mapping[str, str]:
        return {"~/.codex/config.toml": CONFIG.format(model=self.model.model_name, url=session.base_url)}

    def judge(self, work: Path) -> Judged:
        written = read_text(work, "answer.txt") or ""
        return Judged(reward=float(written.strip() == self.task.truth))
