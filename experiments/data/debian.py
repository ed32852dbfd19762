"""Debian packages as a download service: no root, nothing installed.

``apt-get download`` verifies the archive's signatures and checksums; ``dpkg-deb -x`` unpacks
into a folder. When the machine's package lists are missing or old, fresh ones are fetched
into the work folder and used from there, so the machine itself stays as it is.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

TOOLS = ("apt-get", "apt-cache", "dpkg-deb", "tar")
_NO_TEXT = ("js", "png", "svg", "pdf", "gif", "jpg", "otf.gz", "otf", "ttf", "woff", "woff2", "css")
_NETWORK = re.compile(
    r"Could not resolve|Temporary failure|Could not connect|Connection (refused|timed out|failed)"
    r"|Network is unreachable|No route to host",
    re.IGNORECASE,
)
_DISK = re.compile(r"No space left|enough free space", re.IGNORECASE)
# "500 http://ARCHIVE bookworm/main ...": a list of an archive, not of this machine.
_ARCHIVE_LINE = re.compile(r"^ *-?\d+ (?:https?|mirror\S*|cdrom|copy|ftp|file):", re.MULTILINE)
_GONE = re.compile(r"\b404\b")


class PackageError(RuntimeError):
    """A package cannot be had; the message is one line that says what to do."""


class PackageUnknownError(PackageError):
    """This release has none of the packages that a source names: other sources may work."""


@dataclasses.dataclass(frozen=True)
class Packages:
    """Fetches packages into ``work``.

    Raises:
      PackageError: the machine has no apt-get, apt-cache or dpkg-deb.
    """

    work: Path

    def __post_init__(self) -> None:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise PackageError(
                f"{', '.join(missing)} not found: the larger corpus is made from Debian packages "
                "and needs Debian or Ubuntu; the sample corpus works everywhere"
            )
        self.work.mkdir(parents=True, exist_ok=True)

    def fetch(self, names: Sequence[str]) -> tuple[str, str, Path]:
        """Downloads and unpacks the first of ``names`` that this release has.

        Returns:
          (package, version, folder with its files). ``discard`` removes the folder.

        Raises:
          PackageUnknownError: the release has none of them.
          PackageError: no network, no disk space, or the archive refused.
        """
        package, version = self._candidate(names)
        folder = self.work / f"{package}_{version.replace(':', '%3a')}"
        if not folder.is_dir():
            archive = self._download(package, version)
            self._unpack(archive, folder)
            archive.unlink(missing_ok=True)
        return package, version, folder

    def discard(self, folder: Path) -> None:
        """Deletes an unpacked package (links are removed, never followed)."""
        shutil.rmtree(folder, ignore_errors=True)

    def refresh(self) -> None:
        """Fetches package lists into the work folder; ``fetch`` uses them from then on."""
        fresh = self._lists.with_name(f"lists.{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        (fresh / "partial").mkdir(parents=True)
        result = _run(["apt-get", *self._options(fresh), "update"], cwd=self.work)
        # apt-get update ends with 0 when every list failed, so look for what it left.
        if not any(fresh.glob("*_Packages*")):
            shutil.rmtree(fresh, ignore_errors=True)
            raise _explain("package lists", result.stderr)
        try:
            fresh.rename(self._lists)
        except OSError:  # another process was first
            shutil.rmtree(fresh, ignore_errors=True)

    @property
    def _lists(self) -> Path:
        return self.work / "lists"

    def _options(self, lists: Path | None = None) -> list[str]:
        # APT's own sandbox user may not read folders under a home directory.
        options = ["APT::Sandbox::User=root", "Acquire::Retries=2", "Acquire::http::Timeout=30"]
        if lists is None and self._lists.is_dir():
            lists = self._lists
        if lists is not None:
            cache = self.work.resolve() / "apt-cache"
            (cache / "archives" / "partial").mkdir(parents=True, exist_ok=True)
            options += [f"Dir::State::lists={lists.resolve()}", f"Dir::Cache={cache}"]
        return [word for option in options for word in ("-o", option)]

    def _candidate(self, names: Sequence[str]) -> tuple[str, str]:
        for attempt in ("as found", "with fresh lists"):
            for name in names:
                result = _run(["apt-cache", *self._options(), "policy", name], cwd=self.work)
                match = re.search(r"^  Candidate: (\S+)$", result.stdout, re.MULTILINE)
                if match and match[1] != "(none)":
                    return name, match[1]
            if attempt == "as found" and not self._lists.is_dir() and not self._knows_packages():
                self.refresh()
        raise PackageUnknownError(f"this release has no package {' or '.join(names)}")

    def _knows_packages(self) -> bool:
        """False on a fresh container, whose lists hold only what is installed."""
        policy = _run(["apt-cache", *self._options(), "policy"], cwd=self.work).stdout
        return bool(_ARCHIVE_LINE.search(policy))

    def _download(self, package: str, version: str) -> Path:
        command = ["apt-get", *self._options(), "download", "-q", f"{package}={version}"]
        result = _run(command, cwd=self.work)
        if result.returncode and _GONE.search(result.stderr) and not self._lists.is_dir():
            # The archive moved on since the machine's lists were fetched.
            self.refresh()
            package, version = self._candidate([package])
            return self._download(package, version)
        files = sorted(self.work.glob(f"{package}_*.deb"))
        if result.returncode or not files:
            raise _explain(f"package {package}", result.stderr)
        return files[-1]

    def _unpack(self, archive: Path, folder: Path) -> None:
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        result = _unpack_text(archive, temporary)
        if result.returncode:
            shutil.rmtree(temporary, ignore_errors=True)
            archive.unlink(missing_ok=True)
            raise _explain(f"package {archive.name}", result.stderr)
        temporary.rename(folder)


def _unpack_text(archive: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """``dpkg-deb -x`` without pictures, scripts and fonts: most of a manual's bytes."""
    unpack = ["tar", "-x", "-C", str(folder), "--no-same-owner", "--no-same-permissions"]
    excludes = [f"--exclude=*.{suffix}" for suffix in _NO_TEXT]
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as source:
        result = _run([*unpack, *excludes], stdin=source.stdout)
        assert source.stderr is not None
        errors = result.stderr + source.stderr.read().decode(errors="replace")
    return subprocess.CompletedProcess(
        command, result.returncode or source.returncode, result.stdout, errors
    )


def _run(
    command: Sequence[str], *, cwd: Path | None = None, stdin: IO[bytes] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        command, cwd=cwd, env=environment, stdin=stdin, capture_output=True, text=True, check=False
    )


def _explain(what: str, stderr: str) -> PackageError:
    """One line for the user out of apt's many."""
    lines = [line for line in stderr.splitlines() if line.startswith(("E:", "Err:", "dpkg"))]
    detail = lines[0] if lines else stderr.strip().splitlines()[-1:] or "no message"
    if _DISK.search(stderr):
        return PackageError(f"{what}: no disk space left: free some, or give another --out")
    if _NETWORK.search(stderr):
        return PackageError(
            f"{what}: the Debian archive cannot be reached: check the network (or proxy) and run "
            "the command again, finished sources are kept; the sample corpus needs no network"
        )
    return PackageError(f"{what}: apt failed: {detail}")
