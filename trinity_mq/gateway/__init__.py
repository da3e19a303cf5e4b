"""The gateway: sessions of agents that know only a base URL, their rewards, and how they become tasks."""
