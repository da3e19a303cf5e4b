"""Loading of a configuration: a single run, or the stages of several runs."""
