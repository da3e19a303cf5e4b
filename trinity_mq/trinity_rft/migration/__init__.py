"""Migration of a configuration of Trinity-RFT to a configuration of this library."""

from trinity_mq.trinity_rft.migration.commented import as_yaml, comment_lines
from trinity_mq.trinity_rft.migration.migrate import Migration, migrate
from trinity_mq.trinity_rft.migration.move import LeftOut

__all__ = ["LeftOut", "Migration", "as_yaml", "comment_lines", "migrate"]
