"""Human review: requests of operators, verdicts of reviewers, and their outcomes, as events on a single stream."""
