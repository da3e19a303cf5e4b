"""The gateway: sessions of agents that know only a base URL, rewards of sessions, and the conversion of sessions to
tasks.
"""
