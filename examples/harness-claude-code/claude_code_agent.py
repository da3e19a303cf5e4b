"""Claude Code (npm package ``@anthropic-ai/claude-code``), unmodified, on tasks that ask for a file ``answer.txt``."""

from pathlib import Path

from trinity_mq.workflows.sessions.sandboxed_agent import Judged, SandboxedAgentWorkflow, read_text


class ClaudeCode(SandboxedAgentWorkflow):
    """Reward 1 if ``answer.txt`` holds the answer."""

    def judge(self, work: Path) -> Judged:
        written = read_text(work, "answer.txt") or ""
        return Judged(reward=float(written.strip() == self.task.truth))
