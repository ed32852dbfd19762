"""What a build's TOML file may say. A stage runs when its table is there."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from pathlib import Path
from typing import Any

from experiments.data.mixing import MixConfig
from experiments.data.near_duplicates import NearDuplicateConfig
from experiments.data.pipeline.clean import CleanConfig
from experiments.data.pipeline.finish import PackConfig
from experiments.data.pipeline.quality import QualityConfig
from experiments.data.pipeline.readers import ReadConfig, SourceConfig
from experiments.data.pipeline.tables import ConfigError, from_table
from experiments.data.pipeline.tokenize import TokenizeConfig
from experiments.data.substrings import SubstringConfig


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """A build. Stages run in the order of the fields, those that are None do not.

    Attributes:
      out: the folder of the build, relative to the configuration's file.
      source: where the text is (``[[source]]``), in the order of the corpus.
      seed: of everything random.
      workers: processes; by default one per core. The output does not depend on it.
      read: how files become documents.
      clean: repair, rules, language, toxicity, personal data.
      near_duplicates: drops all but one of each cluster of similar documents.
      substrings: cuts text that repeats exactly, but for its first time.
      substrings_exempt: sources that nothing is cut from, such as program code, which a hole
        would break; what they hold is cut from the others all the same.
      held_out: text (``[[held_out]]``, as sources) that no document may resemble or repeat.
      quality: scores by perplexity and classifier, thresholds by quantile.
      tokenize: trains or takes a tokenizer and writes the token store.
      mix: the proportions of the sources in batches, once there is a store.
      pack: how tokens become rows.
    """

    out: str
    source: tuple[SourceConfig, ...]
    seed: int = 0
    workers: int | None = None
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    clean: CleanConfig | None = None
    near_duplicates: NearDuplicateConfig | None = None
    substrings: SubstringConfig | None = None
    substrings_exempt: tuple[str, ...] = ()
    held_out: tuple[SourceConfig, ...] = ()
    quality: QualityConfig | None = None
    tokenize: TokenizeConfig | None = None
    mix: MixConfig = dataclasses.field(default_factory=MixConfig)
    pack: PackConfig = dataclasses.field(default_factory=PackConfig)

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        names = [source.name for source in self.source]
        if not names:
            raise ValueError("at least one [[source]] is needed")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"source names must be unique, got {', '.join(twice)} twice")
        if self.held_out and self.near_duplicates is None and self.substrings is None:
            raise ValueError(
                "[[held_out]] needs [near_duplicates] or [substrings]: they look at it"
            )
        _check_sources(self, set(names), where="")

    @property
    def groups(self) -> dict[str, str]:
        """The group of every source."""
        return {source.name: source.group or source.name for source in self.source}

    @property
    def processes(self) -> int:
        return self.workers or os.cpu_count() or 1


def _check_sources(config: Any, names: set[str], where: str) -> None:
    """Every ``exempt`` must name a source: a typo there would silently exempt nothing."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        place = f"{where}.{field.name}" if where else field.name
        if field.name.endswith("exempt"):
            if unknown := sorted(set(value) - names):
                known = ", ".join(sorted(names))
                raise ValueError(f"{place} names no source: {', '.join(unknown)}; known: {known}")
        elif dataclasses.is_dataclass(value):
            _check_sources(value, names, place)


def read_config(path: Path) -> BuildConfig:
    """Reads and checks a build's TOML file.

    Raises:
      ConfigError: the file is missing or no TOML, or a key or value cannot be used.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    try:
        return from_table(BuildConfig, table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
