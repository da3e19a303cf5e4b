"""Operations on a run: checks, dead letters, cleaning, audits, regrading, debugging."""
