"""The launcher behind ``-m``. Imported at every start of Hydra, hence thin: the work is in ``tracedraft.launch``."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class PoolLauncher(Launcher):
    """Runs jobs on a pool of warm workers, as the config's ``launcher`` says."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from tracedraft.launch.command import launch

        return launch(self.config, self.loader, job_overrides, initial_job_idx)


NODE = {"_target_": "hydra_plugins.tracedraft_launcher.launcher.PoolLauncher"}
ConfigStore.instance().store(group="hydra/launcher", name="pool", node=NODE, provider="tracedraft")
