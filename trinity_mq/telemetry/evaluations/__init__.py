"""Answers to the questions of evaluations, kept in the folders of runs."""
