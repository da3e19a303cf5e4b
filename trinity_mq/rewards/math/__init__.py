"""Rewards for mathematical answers."""
