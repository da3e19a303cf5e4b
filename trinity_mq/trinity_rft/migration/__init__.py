"""Migration of a configuration of Trinity-RFT to a configuration of this library."""

from trinity_mq.trinity_rft.migration.migrate import as_yaml, comment_lines, migrate
from trinity_mq.trinity_rft.migration.transfer import LeftOut, Migration

__all__ = ["LeftOut", "Migration", "as_yaml", "comment_lines", "migrate"]
