"""Hatchling's hook of the wheel `chameleon-mm-native`: it is for one Python and one platform, which `tag` names."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TagHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data.update(pure_python=False, tag=self.config["tag"])
