"""The daemons of a run; each package builds the parts of one agent and runs them."""

from trinity_mq.renamed import install

install()  # modules of this package have old names too
