"""Human review: requests of operators, verdicts of reviewers, and the counted outcomes, from the events on a single
stream.
"""
