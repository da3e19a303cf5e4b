"""Loading of a configuration: one run, or the stages of several."""
