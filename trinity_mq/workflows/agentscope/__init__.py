"""Agents of AgentScope 1.x as workflows (extra ``agentscope``), with the same names and behaviour as in Trinity-RFT."""
