"""OpenCode (npm package ``opencode-ai``), unmodified, on tasks that ask for the file ``answer.txt``."""

import json
from collections.abc import Mapping
from pathlib import Path

from trinity_mq.gateway.local import LocalSession
from trinity_mq.workflows.sessions.sandboxed_agent import Judged, SandboxedAgentWorkflow, read_text


class OpenCode(SandboxedAgentWorkflow):
    """Reward 1 if ``answer.txt`` holds the answer."""

    def files(self, session: LocalSession) -> Mapping[str, str]:
        name = self.model.model_name
        provider = {
            "npm": "@ai-sdk/openai-compatible",  # OpenCode contains this package
            "options": {"baseURL": session.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {name: {"limit": {"context": 32768, "output": 4096}}},
        }
        config: dict[str, object] = {
            "model": f"gateway/{name}",
            "small_model": f"gateway/{name}",
            "provider": {"gateway": provider},
        }
        config |= {"enabled_providers": ["gateway"], "permission": "allow", "share": "disabled", "autoupdate": False}
        return {"~/.config/opencode/opencode.json": json.dumps(config)}

    def judge(self, work: Path) -> Judged:
        written = read_text(work, "answer.txt") or ""
        return Judged(reward=float(written.strip() == self.task.truth))
