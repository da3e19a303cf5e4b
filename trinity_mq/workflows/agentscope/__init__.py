"""Agents of AgentScope 1.x as workflows (extra ``agentscope``): names and behaviour of Trinity-RFT's."""
