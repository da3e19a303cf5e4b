"""Fuzz every decoder with coverage as the guide.

    python tests/fuzz/fuzz_decode.py [--seconds 600] [--corpus FOLDER] [--findings FOLDER]
    python tests/fuzz/fuzz_decode.py --replay FILE...

Wants ``pip install 'trinity-mq[fuzz]'``. Prints executions, what they covered and each kind of finding once, with the
input that showed it; exits with 1 if there is one. ``--corpus`` keeps what was learned for the next time.
"""

# ruff: noqa: T201  # a tool for the terminal
from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import traceback
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTRUMENTED = ("trinity_mq.experience", "trinity_mq.messages")
_STATISTICS = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)/\S+", re.MULTILINE)


def explore(seconds: int, corpus: Path, findings: Path) -> None:
    """Fuzz in this process until the time is over; libFuzzer then ends it."""
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.fuzz import checks
    import torch

    torch.set_num_threads(1)
    for name, data in checks.corpus().items():
        (corpus / name).write_bytes(data)
    seen: set[str] = set()

    def once(data: bytes) -> None:
        try:
            checks.check(data)
        except Exception as error:
            kind = place(error)
            if kind not in seen:
                seen.add(kind)
                path = findings / f"{len(seen)}.bin"
                path.write_bytes(data)
                path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))

    tracemalloc.start()
    options = [f"-max_total_time={seconds}", f"-max_len={checks.MAX_BYTES}", "-timeout=20", "-rss_limit_mb=4096"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={findings}/", str(corpus)], once)
    atheris.Fuzz()


def place(error: BaseException) -> str:
    """Return what tells one kind of finding from another: its type and the innermost line of ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
    return f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__


def replay(paths: list[Path]) -> int:
    """Run inputs again, without the fuzzer, and show the first failure as it is."""
    from tests.fuzz import checks

    tracemalloc.start()
    for path in paths:
        checks.check(path.read_bytes())
    print(f"{len(paths)} inputs: nothing found")
    return 0


def supervise(seconds: int, corpus: Path, findings: Path) -> int:
    """Fuzz in another process, since libFuzzer ends its own, and say what came of it."""
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    known = set(findings.iterdir())
    command = [sys.executable, "-m", "tests.fuzz.fuzz_decode", "--child", "--seconds", str(seconds)]
    child = subprocess.run(
        [*command, "--corpus", str(corpus.resolve()), "--findings", str(findings.resolve())],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    statistics = _STATISTICS.findall(child.stderr)
    found = sorted(set(findings.iterdir()) - known)
    if not statistics or child.returncode:
        print(child.stderr[-4000:])
    if statistics:
        executions, edges, features, inputs = statistics[-1]
        print(f"{executions} executions in {seconds} s; {edges} edges, {features} features, corpus of {inputs} inputs")
    for path in found:
        print(f"\n{path}" + (f"\n{path.read_text()}" if path.suffix == ".txt" else ""))
    print(f"{sum(path.suffix != '.txt' for path in found)} findings")
    return 1 if found or child.returncode or not statistics else 0


def main() -> int:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--findings", type=Path)
    parser.add_argument("--replay", type=Path, nargs="+")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay:
        sys.path.insert(0, str(ROOT))
        return replay(options.replay)
    if options.child:
        explore(options.seconds, options.corpus, options.findings)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        findings = options.findings or Path(tempfile.mkdtemp(prefix="fuzz-findings-"))
        return supervise(options.seconds, options.corpus or Path(scratch), findings)


if __name__ == "__main__":
    raise SystemExit(main())
