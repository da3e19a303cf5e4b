"""Model families: how each family writes messages, tools, thoughts and calls, and how its answers are read.

A family is a row of :data:`trinity_mq.families.table.FAMILIES`. Engines, gateway, training data, rewards and ``debug``
use the rows through :class:`trinity_mq.families.family.Family`.
"""
