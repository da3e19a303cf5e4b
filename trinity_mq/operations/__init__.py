"""Operations on a run: checks, plans, submissions, reviews, dead letters, cleaning, regrading, debugging."""
