"""A policy for `engine.scripts=[teacher_helpers:solve]`: it knows the fix of the first embedded task by heart."""

from dataclasses import replace

from polar_env.engine.scripts import Scene, Turn, fix
from polar_env.tasks import rows


def solve(scene: Scene) -> Turn:
    patch = str(rows.load("embedded")[0].row["patch"])
    return fix(replace(scene, session=replace(scene.session, gold_patch=patch)))
