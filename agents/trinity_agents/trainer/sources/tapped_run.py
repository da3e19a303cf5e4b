"""The run whose stream another run trains on: its name, its folder and its broker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trinity_mq.bus.topology import RUN_NAME
from trinity_mq.config import BrokerConfig, Config, ConfigError, load_config
from trinity_mq.runtime.errors import FatalError

RUNS = Path("runs")
"""Default parent folder of run folders."""
CONFIG_FILE, URL_FILE, BROKER_FOLDER = "config.yaml", "broker.url", "broker"
"""Names in a run's folder: the configuration, the URL file of a running broker, and the data of a private broker."""


@dataclass(frozen=True)
class TappedRun:
    """A run whose stream is read but not changed."""

    name: str
    broker: BrokerConfig
    """Settings of the broker that holds the run's stream and blobs."""
    config: Config | None = None
    """Configuration of the run; None if only its name is known."""
    url_file: Path | None = None
    """File with the URL of the run's private broker, which exists while the broker runs; None for a shared broker."""

    @classmethod
    def of(cls, config: Config) -> TappedRun:
        """Return the run that ``source.tap`` of a configuration names.

        Raises:
            FatalError: The setting does not name another run, or the configuration of that run cannot be used.
        """
        tapped = config.source.tap
        folders = [folder for folder in (Path(tapped).expanduser(), RUNS / tapped) if (folder / CONFIG_FILE).is_file()]
        if not folders:
            if not RUN_NAME.fullmatch(tapped):
                raise FatalError(
                    f"source.tap is {tapped!r}, which is neither a run's folder (with a {CONFIG_FILE}) nor a run's "
                    "name; `trinity-mq list` shows the runs on this machine"
                )
            return cls(tapped, config.broker)
        folder = folders[0].absolute()
        if folder == config.path.absolute():
            raise FatalError(f"source.tap is {tapped!r}, the folder of this run itself: give this run another name")
        try:
            tapped_config = load_config(folder / CONFIG_FILE)
        except ConfigError as error:
            raise FatalError(f"source.tap: the configuration of run {tapped!r} cannot be used: {error}") from error
        own_broker, url_file = config.broker, folder / URL_FILE
        if (folder / BROKER_FOLDER).is_dir():
            private_broker = tapped_config.broker.model_copy(
                update={"url": None, "url_file": str(url_file), "password_file": None}
            )
            return cls(tapped_config.name, private_broker, tapped_config, url_file)
        broker = tapped_config.broker
        if not (broker.url or broker.url_file):  # the configuration file lacks the URL, agents get it separately
            own_fields = {
                "url": own_broker.url,
                "url_file": own_broker.url_file,
                "password_file": own_broker.password_file,
                "tls": own_broker.tls,
            }
            if url_file.is_file():
                own_fields["url"] = url_file.read_text().strip()
            broker = broker.model_copy(update=own_fields)
        return cls(tapped_config.name, broker, tapped_config)
