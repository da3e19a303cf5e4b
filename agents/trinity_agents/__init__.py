"""The daemons of a run; each package builds the parts of one agent and runs them."""

import trinity_mq as trinity_mq  # its import makes old names of modules here importable, see trinity_mq.renamed
