"""Configurations as the command line composes them, without a command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parent.parent


def choices(group: str) -> list[str]:
    """What a group of conf/ offers."""
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("[!_]*.yaml"))


@contextmanager
def conf() -> Iterator[None]:
    """Inside, `compose` reads conf/; for many compositions, which then share the files they have read."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def composed(*overrides: str, hydra: bool = False) -> DictConfig:
    """The configuration of `python run.py <overrides>`. hydra: with Hydra's own part."""
    with conf():
        return compose("config", overrides=list(overrides), return_hydra_config=hydra)


def composed_sweep(name: str, *overrides: str) -> DictConfig:
    """The configuration of `python run.py -cd sweeps -cn <name> <overrides>`, with Hydra's own part."""
    with initialize_config_dir(str(ROOT / "sweeps"), version_base="1.3"):
        search = f"hydra.searchpath=[file://{ROOT / 'conf'}]"
        return compose(name, overrides=[search, *overrides], return_hydra_config=True)
