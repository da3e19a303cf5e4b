"""``trinity-mq regrade``: shows how another reward function would change the rewards of a run's experiences."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from trinity_mq.cli.arguments import add_blob_store, add_broker, add_target, check_least
from trinity_mq.errors import CommandError
from trinity_mq.operations.regrade.run import all_figures, open_grader, regrade_file, regrade_stream
from trinity_mq.runtime.event_loop import run_until_complete
from trinity_mq.targets.connection import find_target
from trinity_mq.targets.target import load_target_configuration, run_list_suffix
from trinity_mq.terminal import write_output

FOUND_NOTHING = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trinity-mq regrade``."""
    add_target(parser)
    parser.add_argument(
        "--reward",
        metavar="NAME",
        required=True,
        help="the other reward function: a name such as math_boxed, or a dotted path such as my_rewards.strict",
    )
    parser.add_argument("--reward-args", metavar="JSON", default="{}", help="its arguments (default: none)")
    parser.add_argument("--batch", metavar="ID", help="only experiences of this batch")
    parser.add_argument(
        "--limit", metavar="N", type=int, help="read no further batch after this number of experiences (default: all)"
    )
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=10.0, help="time limit of a call in seconds (default: 10)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file; - is the standard output")
    parser.add_argument(
        "--file",
        metavar="PATH",
        help="read experiences from this .tmqx file or folder instead of the stream; TARGET is the run that made them",
    )
    add_broker(parser)
    add_blob_store(parser)
    parser.epilog = "exit codes: 0 done; 1 no experience can be regraded"


def regrade(arguments: argparse.Namespace) -> int:
    """Regrade the sampled experiences of a run and print the differences. Return 0, or 1 if no experience could be
    regraded.
    """
    check_least(arguments, limit=1)
    if not arguments.timeout > 0:
        raise CommandError(f"--timeout is {arguments.timeout:g}, wanted seconds above 0")
    if Path(arguments.target).suffix == ".tmqx":
        raise CommandError(
            f"{arguments.target} is a file of experiences, but TARGET must be the run that made them, because its "
            "tasksets hold the answers: trinity-mq regrade RUN --reward NAME --file "
            f"{arguments.target}{run_list_suffix()}"
        )
    config = load_target_configuration(arguments)
    # output of the library and of the reward function must not mix with the figures on stdout
    with contextlib.redirect_stdout(sys.stderr):
        grader = open_grader(config, arguments)
        from trinity_mq.operations.regrade.regrading import BatchRegrader

        regrading = BatchRegrader(config, grader, arguments.limit)
        if arguments.file is not None:
            run_until_complete(regrade_file(config, arguments.file, arguments.batch, regrading))
        else:
            run_until_complete(regrade_stream(find_target(arguments, arguments.blob_store), arguments.batch, regrading))
    figures = all_figures(arguments.reward, regrading, grader)
    if config.operator.operators:
        names = ", ".join(operator.name for operator in config.operator.operators)
        figures["remarks"].append(
            f"old rewards include the effect of the run's operators ({names}), new rewards do not"
        )
    if arguments.json == "-":
        print(json.dumps(figures, ensure_ascii=False, indent=1))
    else:
        if arguments.json is not None:
            write_output(Path(arguments.json), json.dumps(figures, ensure_ascii=False, indent=1) + "\n")
        from trinity_mq.operations.regrade.comparison import print_figures

        print_figures(figures, sys.stdout)
    return 0 if figures["experiences"] else FOUND_NOTHING
