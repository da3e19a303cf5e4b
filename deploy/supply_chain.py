"""What the project depends on when it runs: licences, a bill of materials, and known vulnerabilities of the pins.

    python deploy/supply_chain.py licences [--out docs/licences.md]
    python deploy/supply_chain.py sbom [--out sbom.json]
    python deploy/supply_chain.py hashes [--out deploy/requirements-hashed.txt]
    python deploy/supply_chain.py audit [--pins FILE] [--advisories FOLDER]

``hashes`` writes the pins of the dependencies with the SHA-256 of each file that the package index has for them, except
torch and the packages of its CUDA build. ``licences`` writes a page and fails for a licence that is not allowed,
``sbom`` a bill of materials as CycloneDX JSON. ``audit`` fails for a pin that is known as vulnerable.

Licences and the bill are of the dependencies of pyproject.toml without extras, and theirs, as installed beside this
Python; tools of development are not among them. ``sbom`` and ``audit`` need the extra ``supply``.

``audit`` asks pip-audit's service, the advisories of PyPI, where it answers. Where it does not: a checkout of
https://github.com/pypa/advisory-database (``--advisories``), else the package safety-db, which is as old as it says.
Exit codes: 0 nothing known, 1 a licence that is not allowed or a pin that is known, 2 wrong arguments, 69 no data.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageMetadata, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CNRI-Python",
    "ISC", "LicenseRef-BSD", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
    "LGPL-2.1-or-later",
}  # fmt: skip
"""SPDX identifiers. Of the copyleft ones MPL-2.0 is about changes to its own files, and LGPL-2.1-or-later, of crc32c
alone, about a library that is loaded as it is and can be exchanged. LicenseRef-BSD: "BSD", without saying which."""
ALIASES = {
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD": "LicenseRef-BSD",
    "OSI Approved :: Apache Software License": "Apache-2.0",
    "OSI Approved :: BSD License": "LicenseRef-BSD",
    "OSI Approved :: ISC License (ISCL)": "ISC",
    "OSI Approved :: MIT License": "MIT",
    "OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "OSI Approved :: Python Software Foundation License": "PSF-2.0",
}
"""What older metadata says in words, in the field or as a classifier."""
FIRST_WORDS = {
    "Apache License Version 2.0": "Apache-2.0",
    "Apache Licnse Version 2.0": "Apache-2.0",  # prime-pydantic-config writes it so
    "MIT License": "MIT",
}
"""First words of licence files."""
PAGE = """\
# Licences of the dependencies

trinity_mq itself is under Apache-2.0. The table lists the packages of an installation without extras,
on Linux with Python {release} and the CPU build of torch.
The GPU build adds NVIDIA's libraries, which have other licences.
`LicenseRef-BSD` marks a package that states BSD without the variant. A licence that is not on the list in
`deploy/supply_chain.py` fails the tests. `python deploy/supply_chain.py licences --out docs/licences.md` writes this
page. With `sbom` instead of `licences` it writes the same list with all dependencies as CycloneDX.

| package | version | licence |
|---|---|---|
"""
UNAVAILABLE = 69
PROBE_SECONDS, AUDIT_SECONDS = 60.0, 900.0
OLD_DATA = "safety-db"


# -- what there is


def dependencies(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, Distribution]:
    """Return what the project needs here when it runs, and what that needs, by normalised name.

    Raises:
        SystemExit: Something of it is not installed.
    """
    wanted = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    found: dict[tuple[str, str], Distribution] = {}

    def visit(requirements: Iterable[str], extra: str) -> None:
        for requirement in map(Requirement, requirements):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            for wish in ("", *requirement.extras):
                if (name, wish) not in found:
                    try:
                        found[name, wish] = distribution(name)
                    except PackageNotFoundError:
                        raise SystemExit(
                            f"error: {name} is not installed: pip install -e . -c constraints-cpu.txt"
                        ) from None
                    visit(found[name, wish].requires or (), wish)

    visit(wanted, "")
    return {name: one for (name, _), one in sorted(found.items())}


def pins(file: Path) -> dict[str, str]:
    """Return the versions that a file of constraints names, by normalised name.

    Raises:
        SystemExit: It names none.
    """
    lines = [line.partition("#")[0].partition(";")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    found: dict[str, str] = {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }
    if not found:
        raise SystemExit(f"error: {file} has no line NAME==VERSION")
    return found


# -- hashes

HASHES_HEAD = """\
# The dependencies of trinity_mq at the versions of constraints-cpu.txt, with the SHA-256 of their files. torch is left
# out, because its builds differ from machine to machine: install torch first (docs/install.md). Written by
#   python deploy/supply_chain.py hashes --out deploy/requirements-hashed.txt
"""
TORCH_BUILD = ("cuda-", "nvidia-", "triton")
"""Beginnings of the names of the packages that the CUDA build of torch brings along."""


def hashed_requirements() -> str:
    """Return the dependencies with pins and hashes, for pip's ``--require-hashes``.

    Raises:
        SystemExit: uv is not installed, or the package index does not answer.
    """
    need("uv", "uv")
    words = ["--generate-hashes", "--universal", "--python-version", "3.11", "--no-emit-package", "torch"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", *words]
    done = subprocess.run(
        [*command, "-c", "constraints-cpu.txt", "pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"error: uv ended with {done.returncode}: {done.stderr[-500:]}")
    blocks = re.split(r"^(?=\S)", done.stdout, flags=re.MULTILINE)
    return HASHES_HEAD + "".join(block for block in blocks if not block.startswith(TORCH_BUILD))


# -- licences


def licence(metadata: PackageMetadata) -> str:
    """Return the SPDX expression of a package's metadata; empty where they say nothing that is understood.

    The expression counts, else the free field where it is one, else the classifiers, all of them, else the field in
    words.
    """
    classifiers = [one.removeprefix("License :: ") for one in metadata.get_all("Classifier") or ()]
    by_classifier = sorted({ALIASES[one] for one in classifiers if one in ALIASES})
    field = (metadata["License"] or "").strip()
    for said in (metadata["License-Expression"], field, " AND ".join(by_classifier), ALIASES.get(field)):
        try:
            if said:
                return str(canonicalize_license_expression(said))
        except InvalidLicenseExpression:
            continue
    return ""


def licence_of(package: Distribution) -> str:
    """Return the SPDX expression of a package: what :func:`licence` reads from its metadata, else what the first lines
    of its licence file say.
    """
    if expression := licence(package.metadata):
        return expression
    for file in package.metadata.get_all("License-File") or ():
        text = package.read_text(f"licenses/{file}") or package.read_text(file) or ""
        beginning = " ".join(text[:400].split())
        for words, expression in FIRST_WORDS.items():
            if beginning.startswith(words):
                return expression
    return ""


def is_allowed(expression: str) -> bool:
    """Return whether all parts of an expression are allowed, or all of one of its outermost alternatives.

    >>> is_allowed("MIT OR GPL-3.0-only"), is_allowed("MIT AND (GPL-3.0-only OR Apache-2.0)"), is_allowed("")
    (True, False, False)
    """
    alternatives = expression.split(" OR ") if "(" not in expression else [expression]
    return any(
        all(part.strip("() ") in ALLOWED for part in one.replace(" OR ", " AND ").split(" AND "))
        for one in alternatives
    )


def refused(found: Mapping[str, Distribution]) -> dict[str, str]:
    """Return the packages whose licence is not allowed, with what they say of it."""
    said = {name: licence_of(one) for name, one in found.items()}
    return {name: expression for name, expression in said.items() if not is_allowed(expression)}


def licences_page(found: Mapping[str, Distribution]) -> str:
    """Return docs/licences.md."""
    release = ".".join(platform.python_version_tuple()[:2])
    head = PAGE.format(release=release)
    rows = (f"| {one.metadata['Name']} | {public(one.version)} | {licence_of(one)} |" for one in found.values())
    return head + "\n".join(rows) + "\n"


def public(version: str) -> str:
    """Return a version without the name of a local build."""
    return Version(version).public


# -- the bill of materials


def bill(found: Mapping[str, Distribution]) -> dict[str, Any]:
    """Return the CycloneDX document of these packages, with what needs what.

    Raises:
        SystemExit: cyclonedx-bom is not installed, or failed.
    """
    need("cyclonedx_py", "cyclonedx-bom")
    command = ["environment", "--output-reproducible", "--of", "JSON", "--pyproject", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", *command, sys.executable], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"error: cyclonedx-bom ended with {done.returncode}: {done.stderr[-500:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    kept, root = [], document["metadata"]["component"]
    for component in document["components"]:
        package = found.get(canonicalize_name(component["name"]))
        if package is not None:
            if not component.get("licenses") and (known := licence_of(package)):
                component["licenses"] = [{"expression": known}]
            kept.append(component)
    references = {one["bom-ref"]: canonicalize_name(one["name"]) for one in kept}
    direct = {canonicalize_name(Requirement(one).name) for one in declared()}
    needs = {one["ref"]: one.get("dependsOn", []) for one in document["dependencies"]}
    document["components"] = kept
    document["dependencies"] = [
        {"ref": ref, "dependsOn": [one for one in needs.get(ref, []) if one in references]} for ref in references
    ] + [{"ref": root["bom-ref"], "dependsOn": [ref for ref, name in references.items() if name in direct]}]
    return document


def declared() -> list[str]:
    """Return the dependencies that pyproject.toml names."""
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return found


def need(module: str, package: str) -> None:
    """Refuse to go on without a tool.

    Raises:
        SystemExit: It is not installed.
    """
    if not find_spec(module):
        raise SystemExit(f"error: {package} is not installed: pip install -e '.[supply]' -c constraints-cpu.txt")


# -- known vulnerabilities


@dataclass(frozen=True)
class Advisory:
    """A pin that is known as vulnerable."""

    package: str
    version: str
    name: str
    """Of the advisory."""

    def __str__(self) -> str:
        return f"{self.package}=={self.version}: {self.name}"


def from_service(wanted: Mapping[str, str], seconds: float) -> tuple[list[Advisory], list[str]] | None:
    """Return what pip-audit's service knows, and the packages that it does not; None where it does not answer."""
    if not find_spec("pip_audit"):
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={version}\n" for name, version in wanted.items()))
        file.flush()
        words = ["-r", file.name, "--no-deps", "--disable-pip", "-f", "json", "--progress-spinner", "off"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pip_audit", *words],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            return answers_of(done.stdout)
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            return None


def answers_of(text: str) -> tuple[list[Advisory], list[str]] | None:
    """Read pip-audit's JSON, which names packages that it could not look up among those without vulnerabilities."""
    answers = json.loads(text)["dependencies"]
    known = [one for one in answers if "skip_reason" not in one]
    unknown = [one["name"] for one in answers if "skip_reason" in one]
    if not known:
        return None
    return [Advisory(one["name"], one["version"], hit["id"]) for one in known for hit in one["vulns"]], unknown


def from_checkout(wanted: Mapping[str, str], folder: Path) -> Iterator[Advisory]:
    """Yield what a checkout of PyPA's advisory database, or any folder of OSV files in YAML or JSON, knows."""
    import yaml

    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".json")):
        advisory = yaml.load(file.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if not isinstance(advisory, dict) or advisory.get("withdrawn"):
            continue
        for affected in advisory.get("affected", ()):
            name = canonicalize_name(affected.get("package", {}).get("name", ""))
            if name in wanted and concerns(affected, wanted[name]):
                yield Advisory(name, wanted[name], advisory["id"])


def concerns(affected: Mapping[str, Any], version: str) -> bool:
    """Return whether a version is among those that an OSV entry affects.

    See https://ossf.github.io/osv-schema/#affectedranges-field.
    """
    if version in affected.get("versions", ()):
        return True
    at = Version(version)
    for one in affected.get("ranges", ()):
        if one.get("type") != "ECOSYSTEM":
            continue
        inside = False
        for event in one["events"]:  # in order of versions
            if "introduced" in event and (event["introduced"] == "0" or at >= Version(event["introduced"])):
                inside = True
            if ("fixed" in event and at >= Version(event["fixed"])) or (
                "last_affected" in event and at > Version(event["last_affected"])
            ):
                inside = False
        if inside:
            return True
    return False


def from_safety(wanted: Mapping[str, str]) -> Iterator[Advisory]:
    """Yield what the package safety-db knows."""
    # the package reads its data from the current folder when it is imported
    file = Path(str(distribution(OLD_DATA).locate_file("safety_db/insecure_full.json")))
    known = json.loads(file.read_text(encoding="utf-8"))
    for name, version in wanted.items():
        for entry in known.get(name, ()):
            if any(Version(version) in SpecifierSet(one, prereleases=True) for one in entry["specs"]):
                yield Advisory(name, version, entry.get("cve") or entry["id"])


def audit(file: Path, advisories: Path | None) -> int:
    """Print what is known of the pins of a file; return the exit code."""
    wanted = pins(file)
    probe = dict(list(wanted.items())[:1])
    hits: list[Advisory]
    if advisories is not None:
        if not any(advisories.rglob("*.yaml")) and not any(advisories.rglob("*.json")):
            raise SystemExit(f"error: no advisory (*.yaml, *.json) below {advisories}")
        hits, source = list(from_checkout(wanted, advisories)), f"{advisories}, {newest(advisories)}"
    elif from_service(probe, PROBE_SECONDS) is not None and (
        (answer := from_service(wanted, AUDIT_SECONDS)) is not None
    ):
        hits, unknown = answer
        source = "the advisories of PyPI, as they are now" + (f", not of {', '.join(unknown)}" if unknown else "")
    elif find_spec("safety_db"):
        hits, source = (
            list(from_safety(wanted)),
            f"{OLD_DATA} of {distribution(OLD_DATA).version}; nothing newer is in it",
        )
    else:
        print("no data: the service of pip-audit did not answer, and neither --advisories nor safety-db is there")
        return UNAVAILABLE
    for hit in sorted(map(str, hits)):
        print(hit)
    print(f"{file.name}: {len(wanted)} pins, {len(hits)} known vulnerabilities; source: {source}")
    return int(bool(hits))


def newest(folder: Path) -> str:
    """Return the day of the last change to a folder of advisories."""
    done = subprocess.run(
        ["git", "-C", str(folder), "log", "-1", "--format=%cs"], capture_output=True, text=True, check=False
    )
    return f"state of {done.stdout.strip()}" if done.returncode == 0 else "its date is not known"


# -- the command


def main() -> int:
    """Do what is asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("licences", "sbom", "hashes"):
        actions.add_parser(name).add_argument("--out", type=Path, help="file (default: standard output)")
    check = actions.add_parser("audit")
    check.add_argument("--pins", type=Path, default=ROOT / "constraints-cpu.txt", help="default: %(default)s")
    check.add_argument("--advisories", type=Path, help="folder of OSV files, such as a checkout of PyPA's database")
    options = parser.parse_args()
    if options.action == "audit":
        return audit(options.pins, options.advisories)
    found = {} if options.action == "hashes" else dependencies()
    if options.action == "hashes":
        text = hashed_requirements()
    else:
        text = licences_page(found) if options.action == "licences" else json.dumps(bill(found), indent=1) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    bad = refused(found)
    for name, said in bad.items():
        print(f"not allowed: {name} is under {said or 'a licence that its metadata do not name'}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
