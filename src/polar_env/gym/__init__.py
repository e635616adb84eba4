"""The gym room: the only door to NeMo Gym.

``resources_server`` (`polar`), ``agent`` (`polar_agent`) and ``environment_server`` are Gym's faces of ``environment``
(PolarEnvironment, which does the work) · ``rows`` and ``contract`` write and judge what NeMo-RL takes · ``launch``
starts Gym as NeMo-RL does · ``root`` is the directory tree Gym finds us by.
"""

from pathlib import Path

ROOT = Path(__file__).parent / "root"
"""The directory to put into NEMO_GYM_EXTRA_ROOTS: Gym finds code outside its wheel only by directory."""
