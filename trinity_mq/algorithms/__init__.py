"""Advantage estimators and losses: the path from rewards to a gradient."""
