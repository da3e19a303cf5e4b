"""Answers to the questions of evaluations, stored in run folders."""
