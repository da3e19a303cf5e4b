"""Human review: what an operator asks, what people answer, and what counts, by the events on one stream."""
