"""The daemons of a run. Each package except ``simulation`` builds the parts of one kind of agent and runs them."""

from trinity_mq.renamed import install

install()  # modules of this package have old names too
