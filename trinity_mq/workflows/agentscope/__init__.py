"""Workflows of AgentScope 1.x agents (extra ``agentscope``), with the names and behaviour of Trinity-RFT's workflows.
"""
