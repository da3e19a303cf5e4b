"""The gateway: answers agents that know only a base URL, and makes tasks of their sessions."""
